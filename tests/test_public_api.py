import inspect
import subprocess
import sys

import staleflow


def test_importing_staleflow_imports_neither_torch_nor_transformers_nor_an_http_client_nor_a_command() -> None:
    heavy = {"torch", "transformers", "matplotlib", "aiohttp", "staleflow.cli", "staleflow.bench"}
    program = f"import staleflow, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_all_is_sorted_and_everything_in_it_is_documented() -> None:
    constants = [name for name in staleflow.__all__ if name.isupper() and name != "LLM"]
    classes = [name for name in staleflow.__all__ if name[0].isupper() and name not in constants]
    functions = [name for name in staleflow.__all__ if name[0].islower()]
    ordered = sorted(classes, key=lambda name: (not name.isupper(), name)) + sorted(functions)
    assert staleflow.__all__ == ordered
    for name in staleflow.__all__:
        assert inspect.getdoc(getattr(staleflow, name)), name


def test_every_public_method_is_documented() -> None:
    for name in staleflow.__all__:
        exported = getattr(staleflow, name)
        if not inspect.isclass(exported) or not exported.__module__.startswith("staleflow."):
            continue
        for attribute, value in vars(exported).items():
            if inspect.isfunction(value) and not attribute.startswith("_"):
                assert value.__doc__, f"{name}.{attribute}"
