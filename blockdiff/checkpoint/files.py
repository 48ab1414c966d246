"""The files of a checkpoint directory: find them, list their tensors, read them one at a time."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from blockdiff.checkpoint.remote_code import CODE
from blockdiff.data.images import PROCESSORS
from blockdiff.errors import CheckpointError
from blockdiff.files import is_hub_id, read_text
from blockdiff.tensor_pieces import Block

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
MODEL = "model"  # the directory in a run with its trained model
ADAPTER = "adapter"  # or with its adapter
CHECKPOINTS = "checkpoints"  # and with the checkpoints to resume from
REPORT = "report.json"  # a run writes it at its end
ADAPTER_CONFIG = "adapter_config.json"
MODELOPT_CONFIG = "hf_quant_config.json"  # has the forms of ModelOpt's weights if config.json has not
GENERATION = "generation_config.json"
ADDED = "blockdiff.safetensors"  # tensors that a custom model class adds (`added.py`)
DIFFUSION = "blockdiff.json"  # settings of the training (`checkpoint.diffusion`)
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model")  # a directory with neither holds no tokenizer
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
# Files beside config and weights that are copied from the loaded checkpoint to the saved one.
SIDE_FILES = (GENERATION, DIFFUSION, *TOKENIZER_FILES, *PROCESSORS)
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
INTEGER = "I64"  # dtype of tensors of token ids
# Bytes per number; every other dtype of safetensors (BOOL, U8, F8_E4M3, ...) has one byte.
WIDTH = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}

LARGEST_JSON = 1 << 22  # bytes of a config or another small file
LARGEST_INDEX = 1 << 26  # bytes of the index: names and files of all tensors
MOST_TENSORS = 250_000  # in a file; single experts make some 100,000
LARGEST_HEADER = 1 << 25  # bytes of the entries of a file's tensors and metadata
MOST_METADATA = 100_000  # entries of a file's metadata

SAMPLE = 1024  # numbers of each tensor that `fingerprint` reads


@dataclass(frozen=True)
class Stored:
    """The entry of a tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: F32, BF16, ...
    nbytes: int
    inside: tuple[str, int] | None = None  # if it is rows of a tensor in the file: that name, first row

    def place(self, name: str, block: Block | None) -> tuple[str, Block | None]:
        """Return the name in the file of the tensor that holds tensor `name`, and the block of it that is `block`.

        Both are unchanged unless the tensor is some rows of one in the file. A block None means all of the tensor.
        """
        if self.inside is None:
            return name, block
        whole, row = self.inside
        box = block or Block.whole(self.shape)
        return whole, Block((row + box.offsets[0], *box.offsets[1:]) if box.offsets else (), box.sizes)


@dataclass(frozen=True)
class Carried:
    """The parts of a checkpoint that the model does not run: image tensors and the files beside the weights.

    A loaded model has the entries of the tensors (`stored`), and saving copies these; `init` holds them as `tensors`.
    side_files: copied on saving. origin: the directory that the weights were loaded from. forms: by our names, the
    `FileForm` of each weight that is stored in fewer bits there. activations: scales beside those weights, by which
    other programs round inputs, keys and values.
    """

    stored: Mapping[str, Stored] = field(default_factory=dict)
    forms: Mapping[str, Any] = field(default_factory=dict)
    activations: Mapping[str, Stored] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    side_files: tuple[Path, ...] = ()
    origin: Path | None = None

    def over(self, directory: Path) -> Carried:
        """Return a copy with the side files of `directory` first, in place of old ones with the same names.

        If `directory` has a tokenizer, no file of the old tokenizer is kept.
        """
        adapter_files = tuple(directory / name for name in SIDE_FILES if (directory / name).is_file())
        names = {file.name for file in adapter_files}
        has_tokenizer = not names.isdisjoint(VOCABULARY_FILES)  # files of two tokenizers must not be mixed
        kept_files = [
            f for f in self.side_files if not (f.name in names or (has_tokenizer and f.name in TOKENIZER_FILES))
        ]
        return replace(self, side_files=(*adapter_files, *kept_files))

    def directories(self) -> set[Path]:
        """Return the directories of all files that saving copies from."""
        files = [*self.side_files, *(in_file.file for in_file in self.stored.values())]
        return {file.absolute().parent for file in files}


def find(path_or_hub_id: str | Path, with_weights: bool = True) -> Path:
    """Return the directory of a checkpoint.

    That is the path itself; the model or adapter in it, if it is a run; or the local copy of a Hub repository.
    with_weights: if False, only the small files beside the weights are fetched from the Hub. Raises CheckpointError if
    there is no checkpoint, and if one of its files is a pipe or a device, because reading that may never end.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        is_run = not (path / CONFIG).exists() and not (path / ADAPTER_CONFIG).exists()
        inside = [each for each in (MODEL, ADAPTER) if is_run and (path / each).is_dir()]
        if is_run and not inside and (path / CHECKPOINTS).is_dir():
            steps = sorted(
                (each.name for each in (path / CHECKPOINTS).glob("step-*")), key=lambda name: (len(name), name)
            )
            saved = f"its checkpoints are {', '.join(steps)}" if steps else "it has no checkpoint yet either"
            raise CheckpointError(
                f"{path}: a run that has no model yet; {saved} (sample, eval, export: --checkpoint last)"
            )
        directory = path / inside[0] if inside else path
        if inside:
            _warn_of_newer(path, inside[0])
        for name in (CONFIG, WEIGHTS, INDEX, ADDED, *SIDE_FILES):
            require_regular(directory / name)
        return directory
    if path.exists():
        raise CheckpointError(f"{path} is a file; a checkpoint is a directory with {CONFIG} and {WEIGHTS}")
    if not is_hub_id(str(path_or_hub_id)):
        raise CheckpointError(f"{path}: no such directory; name a checkpoint directory or a hub id")
    from huggingface_hub import snapshot_download

    try:
        small = (CONFIG, ADAPTER_CONFIG, MODELOPT_CONFIG, *SIDE_FILES, CODE)
        patterns = [*small, *(("*.safetensors", INDEX) if with_weights else ())]
        return Path(snapshot_download(str(path_or_hub_id), allow_patterns=patterns))
    except (OSError, ValueError, RuntimeError) as error:
        reason = first_line(error)
        raise CheckpointError(
            f"{path_or_hub_id}: no such directory, and not to be had from the Hub ({reason})"
        ) from error


def _warn_of_newer(run: Path, exported: str) -> None:
    """Warn if a finished run was continued and has checkpoints newer than its directory `exported`."""
    try:
        ended = read_json(run / REPORT).get("steps") if (run / REPORT).is_file() else None
    except CheckpointError:
        return
    names = (each.name.removeprefix("step-") for each in (run / CHECKPOINTS).glob("step-*"))
    newest = max((int(step) for step in names if step.isdecimal()), default=0)
    if isinstance(ended, int) and ended < newest:
        warnings.warn(
            f"{run}: {exported}/ is of step {ended}, and the run has gone on to step {newest} since; "
            "sample, eval and export take that with --checkpoint last",
            stacklevel=1,
        )


def require_regular(file: Path) -> None:
    """Raise CheckpointError if `file` exists and is not a regular file."""
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file}: not a regular file; remove it or put a file there")


def read_json(file: Path, most: int = LARGEST_JSON) -> dict[str, Any]:
    """Return the JSON object in `file`. CheckpointError if there is none, or if the file has more than `most` bytes."""
    try:
        data = json.loads(read_text(file, most))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent}: no {file.name}; not a checkpoint directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({first_line(error)})") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: a JSON object was expected, not a {type(data).__name__}")
    return data


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Return the entries of all tensors of a checkpoint by Hub name; only headers are read.

    Raises CheckpointError if a file is missing, cut short or not safetensors.
    """
    if (directory / WEIGHTS).exists():
        return tensors_in(directory / WEIGHTS)
    if not (directory / INDEX).exists():
        other = next((f.name for f in sorted(directory.glob("*.bin"))), None)
        hint = f"; {other} is not read, convert it to safetensors" if other else ""
        raise CheckpointError(f"{directory}: neither {WEIGHTS} nor {INDEX}{hint}")
    placed = read_json(directory / INDEX, LARGEST_INDEX).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise CheckpointError(f"{directory / INDEX}: no weight_map from tensor to file")
    headers = {}
    for file in sorted(set(placed.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{directory / INDEX}: {file!r} is not a file name")
        headers[file] = tensors_in(directory / file)
    for name, file in placed.items():
        if name not in headers[file]:
            raise CheckpointError(f"{directory / file}: tensor {name} is missing; {INDEX} places it there")
    return {name: headers[file][name] for name, file in placed.items()}


def read_tensors(stored: Mapping[str, Stored], names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors as stored, on the CPU, file by file and one at a time; each is a view of its file.

    Raises CheckpointError if one cannot be read.
    """
    yield from ((name, tensor) for name, _, tensor in read_blocks(stored, [(name, None) for name in names]))


def read_blocks(
    stored: Mapping[str, Stored], blocks: Iterable[tuple[str, Block | None]]
) -> Iterator[tuple[str, Block | None, Tensor]]:
    """Yield (name, block, tensor) for each of `blocks` as stored, on the CPU, file by file and one at a time.

    Only the block is read from the file. A block None means the whole tensor, which is a view of its file. Raises
    CheckpointError if one cannot be read.
    """
    wanted_of: dict[Path, list[tuple[str, Block | None]]] = {}
    for name, block in blocks:
        wanted_of.setdefault(stored[name].file, []).append((name, block))
    for file, here in wanted_of.items():
        try:
            with safe_open(file, framework="pt", device="cpu") as handle:
                for name, block in here:
                    yield name, block, read_block(handle, *stored[name].place(name, block))
        except FileNotFoundError:
            raise CheckpointError(f"{file} has gone since it was loaded; {here[0][0]} is read from it") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: {here[0][0]} cannot be read ({first_line(error)})") from error


def read_block(handle: Any, name: str, block: Block | None) -> Tensor:
    """Read a block (None: all) of a tensor in an open safetensors file."""
    if block is None or not block.sizes:
        whole: Tensor = handle.get_tensor(name)
        return whole
    part = handle.get_slice(name)
    if not block.numel:
        return torch.empty(block.sizes, dtype=DTYPES.get(part.get_dtype()))
    read: Tensor = part[block.slices]
    return read


def fingerprint(directory: Path) -> str:
    """Return a digest of a checkpoint's weights: name, shape, dtype and a few numbers of every tensor.

    The numbers are up to `SAMPLE` in the middle of the middle row, so the cost does not grow with the tensors.
    """
    stored = stored_tensors(directory)
    hashed = hashlib.blake2b(digest_size=16)
    for name, in_file in sorted(stored.items()):
        hashed.update(f"{name} {in_file.shape} {in_file.dtype}\n".encode())
    in_middle = [
        (name, _in_middle(in_file.shape)) for name, in_file in sorted(stored.items()) if 0 not in in_file.shape
    ]
    for _, _, numbers in read_blocks(stored, sorted(in_middle, key=lambda each: str(stored[each[0]].file))):
        hashed.update(numbers.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def _in_middle(shape: tuple[int, ...]) -> Block:
    """Return the block of up to `SAMPLE` numbers in the middle of a tensor's middle row."""
    sizes = (*(1 for _ in shape[:-1]), *(min(size, SAMPLE) for size in shape[-1:]))
    return Block(tuple((size - part) // 2 for size, part in zip(shape, sizes, strict=True)), sizes)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not empty, or the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def tensors_in(file: Path) -> dict[str, Stored]:
    """Return the entries of a safetensors file's tensors by name; only the header is read. Raises CheckpointError."""
    require_regular(file)
    try:
        _require_small_header(file)
        with safe_open(file, framework="pt", device="cpu") as handle:
            return {name: _stored(file, handle.get_slice(name)) for name in list(handle.keys())}
    except FileNotFoundError:
        if not file.parent.is_dir():
            raise CheckpointError(
                f"{file.parent}: was removed while it was read, as a run that goes on removes old ones; try again"
            ) from None
        raise CheckpointError(f"{file.parent}: {INDEX} names {file.name}, which is not there") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: truncated or not a safetensors file ({first_line(error)})") from error


def metadata_in(file: Path) -> Mapping[str, str]:
    """Return the metadata of a safetensors file, {} if it has none. Raises CheckpointError."""
    require_regular(file)
    try:
        _require_small_header(file)
        with safe_open(file, framework="pt", device="cpu") as handle:
            return handle.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: truncated or not a safetensors file ({first_line(error)})") from error


def _require_small_header(file: Path) -> None:
    """Raise CheckpointError if the header of a safetensors file is so large that parsing takes long.

    Its entries are counted by characters: a tensor has a brace and ten quotation marks, a metadata entry four.
    """
    with file.open("rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        header = handle.read(min(size, LARGEST_HEADER))
    if size > LARGEST_HEADER and size <= file.stat().st_size:
        raise CheckpointError(f"{file}: its header has {size:,} bytes; at most {LARGEST_HEADER:,} are read")
    tensors, marks = header.count(b"{"), header.count(b'"')
    if tensors > MOST_TENSORS + 2:
        raise CheckpointError(f"{file}: has {tensors:,} tensors; at most {MOST_TENSORS:,} are read")
    if marks - 10 * tensors > 4 * MOST_METADATA:
        raise CheckpointError(f"{file}: its metadata has more than {MOST_METADATA:,} entries; remove them")


def _stored(file: Path, part: Any) -> Stored:
    shape, dtype = tuple(part.get_shape()), part.get_dtype()
    return Stored(file, shape, dtype, math.prod(shape) * WIDTH.get(dtype, 1))
