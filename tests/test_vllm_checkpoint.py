"""What a vLLM server takes for weights of its model, without a server."""

import json
from pathlib import Path

import pytest

from staleflow.errors import WeightsError
from staleflow.testing import character_llama

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

EXPECTED = {"a.weight": (2, 3), "b.weight": (4,), "lm_head.weight": (5, 3)}


def test_tensors_of_a_file_in_memory_are_those_that_were_saved() -> None:
    import torch
    from safetensors.torch import save

    from staleflow.engines.vllm_checkpoint import tensors_in

    saved = {
        "matrix": torch.randn(3, 5),
        "half": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float16),
    }
    loaded = tensors_in(memoryview(save(saved, {"format": "pt"})))
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_tensors_of_a_published_version_are_mapped_with_all_pages(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from staleflow.engines.vllm_checkpoint import published_tensors

    saved = torch.randn(1 << 20)
    save_file({"a.weight": saved}, tmp_path / "a.safetensors")
    published = published_tensors(tmp_path)
    size_kb = (tmp_path / "a.safetensors").stat().st_size // 1024
    assert resident_kb(tmp_path / "a.safetensors") >= size_kb
    assert torch.equal(published["a.weight"], saved)


def resident_kb(file: Path) -> int:
    """How much of a file is mapped to memory of this process."""
    _, of_file = Path("/proc/self/smaps").read_text().split(f"{file}\n")
    (resident,) = [line for line in of_file.splitlines()[:10] if line.startswith("Rss:")]
    return int(resident.split()[1])


def test_type_that_cannot_be_loaded_is_named() -> None:
    import torch
    from safetensors.torch import save

    from staleflow.engines.vllm_checkpoint import tensors_in

    with pytest.raises(WeightsError, match="a is of type I64; F32, F16, BF16 can be loaded"):
        tensors_in(memoryview(save({"a": torch.tensor([1])})))


def test_weights_of_the_model_are_accepted_with_and_without_a_tied_head() -> None:
    from staleflow.engines.vllm_checkpoint import check_shapes

    check_shapes(EXPECTED, EXPECTED, set())
    untied = {name: shape for name, shape in EXPECTED.items() if name != "lm_head.weight"}
    check_shapes(untied, EXPECTED, {"lm_head.weight"})
    check_shapes(EXPECTED, untied, {"lm_head.weight"})


def test_weights_of_another_model_are_refused_by_name() -> None:
    from staleflow.engines.vllm_checkpoint import check_shapes

    with pytest.raises(WeightsError) as refused:
        check_shapes({"a.weight": (2, 4), "c.weight": (1,)}, EXPECTED, set())
    assert str(refused.value) == (
        "these are weights of another model: b.weight is missing; lm_head.weight is missing; c.weight is unknown "
        "and 1 more"
    )


def test_checkpoint_is_that_of_the_index_where_there_is_one(tmp_path: Path) -> None:
    from staleflow.engines.vllm_checkpoint import checkpoint_files, shapes_in

    model = character_llama(tmp_path, "abc")
    (path,) = checkpoint_files(str(model), None)
    assert shapes_in([path])["model.embed_tokens.weight"] == (5, 64)
    (model / "consolidated.safetensors").write_bytes(path.read_bytes())
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert checkpoint_files(str(model), None) == [path]


def test_model_without_safetensors_is_refused(tmp_path: Path) -> None:
    from staleflow.engines.vllm_checkpoint import checkpoint_files

    with pytest.raises(WeightsError, match="holds no safetensors files"):
        checkpoint_files(str(tmp_path), None)
