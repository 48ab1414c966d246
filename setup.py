"""Which folders make the package; everything else stands in pyproject.toml.

`cli/`, `recipes/` and `docs/` live beside `blockdiff/` for the reader and install inside it (messages name pages).
"""

from setuptools import find_packages, setup

BESIDE = {f"blockdiff.{folder}": folder for folder in ("cli", "docs", "recipes")}

setup(
    packages=[*find_packages(include=["blockdiff", "blockdiff.*"]), *BESIDE],
    package_dir=BESIDE,
    package_data={
        "blockdiff": ["py.typed"],
        "blockdiff.data": ["templates/*"],
        "blockdiff.docs": ["**/*.md"],
        "blockdiff.kernels": ["*.json", "*.h", "*/*.h", "*/*.c"],
        "blockdiff.plots": ["*.css", "*.html", "*.js"],
        "blockdiff.serving": ["*.css", "*.html", "*.js"],
        "blockdiff.recipes": ["**/*.yaml", "**/*.json", "**/*.md", "**/*.sh"],
    },
    include_package_data=False,
)
