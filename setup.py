"""Which folders make the package; everything else stands in pyproject.toml.

`cli/`, `recipes/` and `docs/` live beside `blockdiff/` for the reader and install inside it (messages name pages).
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["blockdiff", "blockdiff.*"]),
        "blockdiff.cli",
        "blockdiff.docs",
        "blockdiff.recipes",
    ],
    package_dir={"blockdiff.cli": "cli", "blockdiff.docs": "docs", "blockdiff.recipes": "recipes"},
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
