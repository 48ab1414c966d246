"""A checkpoint of a tiny random model that takes images and chats, as people have one on disk."""

from __future__ import annotations

import io
import json
from pathlib import Path

from PIL import Image

import blockdiff
from tests.support.asking import chat_tokenizer
from tests.support.oracle import TWO_LAYERS, tiny_config

AROUND = ("<|image>", "<|image|>", "<image|>")
PROCESSOR = {  # in the form of the released file
    "audio_ms_per_token": 40,
    "image_processor": dict(
        image_processor_type="Gemma4ImageProcessor", patch_size=4, pooling_kernel_size=2, max_soft_tokens=70
    ),
    "image_seq_length": 280,
    "processor_class": "Gemma4Processor",
}


def seeing_checkpoint(directory: Path) -> Path:
    """Write the checkpoint of a model of random weights with canvases of 8 tokens."""
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(AROUND)})
    config = tiny_config(8, **TWO_LAYERS)
    config.vision_config.pooling_kernel_size, config.vision_config.position_embedding_size = 2, 128
    ids = tokenizer.convert_tokens_to_ids(AROUND)
    config.boi_token_id, config.image_token_id, config.eoi_token_id = ids
    model = blockdiff.init(config, seed=3, device="cpu", kernels="torch")
    blockdiff.save(model, directory)
    tokenizer.save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps(PROCESSOR))
    (directory / "generation_config.json").write_text(json.dumps({"max_denoising_steps": 3, "max_new_tokens": 16}))
    return directory


def png(colour: str = "red", width: int = 40, height: int = 20) -> bytes:
    """The bytes of a picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()
