"""Standing in for the vendor's package, in processes of their own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import nki
import numpy as np
import pytest
import torch

from kdk.backends.nki import emulator

ROOT = Path(__file__).parents[2]


def python(code, tmp_path, *args, **environment):
    """Run code in a new interpreter that also finds modules in tmp_path."""
    path = os.pathsep.join([str(tmp_path), str(ROOT / "bindings"), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"} | environment
    command = [sys.executable, *args, "-c", textwrap.dedent(code)] if code else [sys.executable, *args]
    done = subprocess.run(command, capture_output=True, text=True, env=settings, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def package(tmp_path, content):
    (tmp_path / "nki").mkdir()
    (tmp_path / "nki" / "__init__.py").write_text(content)


def test_installed_modules():
    import nki.isa
    import nki.language
    import nki.typing

    assert emulator.install() is nki and emulator.is_emulator(nki)
    assert nki.isa.constants.engine is nki.isa.engine
    assert nki.typing.tensor[128, 512] is nki.language.NkiTensor
    assert not emulator.vendor_nki_available()


def test_imports_no_torch(tmp_path):
    code = """
        import sys
        from kdk.backends.nki import emulator
        nki = emulator.install()
        import nki.language as nl, numpy as np
        assert (nki.simulate(lambda x: nl.store(x, nl.load(x)) or x)(np.ones((2, 2), np.float32)) == 1).all()
        print("torch" in sys.modules)
    """
    assert python(code, tmp_path) == "False\n"


def test_the_placeholder_counts_as_absent(tmp_path):
    package(tmp_path, "raise ImportError('install the real one')")
    code = """
        import sys
        from kdk.backends.nki import emulator
        print(emulator.vendor_nki_available(), "nki" in sys.modules)
        emulator.install()
        import nki
        print(emulator.is_emulator(nki), emulator.vendor_nki_available())
    """
    assert python(code, tmp_path) == "False False\nTrue False\n"


def test_the_vendors_package_is_left_alone(tmp_path):
    package(tmp_path, "def simulate(kernel): ...")
    code = """
        from kdk.backends.nki import emulator
        print(emulator.vendor_nki_available())
        import nki
        try:
            emulator.install()
        except RuntimeError as error:
            print("vendor's nki is already imported" in str(error), emulator.is_emulator(nki))
    """
    assert python(code, tmp_path) == "True\nTrue False\n"


def test_absent(tmp_path):
    code = """
        import importlib.machinery
        from kdk.backends.nki import emulator
        print(importlib.machinery.PathFinder.find_spec("nki") is None, emulator.vendor_nki_available())
    """
    assert python(code, tmp_path) == "True False\n"


def test_running_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        import nki, nki.language as nl
        import numpy as np

        @nki.jit
        def double(x):
            out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
            nl.store(out, nl.multiply(nl.load(x), 2.0))
            return out

        if __name__ == "__main__":
            print(double(np.full((2, 2), float(sys.argv[1]), np.float32))[0, 0], sys.argv)
    """)
    )
    out = python("", tmp_path, "-m", "kdk.backends.nki.emulator", str(script), "3")
    assert out == f"6.0 {[str(script), '3']}\n"


def test_target_of_the_environment(monkeypatch):
    x = np.ones((1, 1), np.float32)

    def generation(**settings):
        sim = emulator.simulate(lambda x: nki.language.store(x, nki.language.load(x)), **settings)
        sim(x)
        return sim.report["generation"]

    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    assert generation() == 3
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    assert generation() == 4 and generation(target="trn2") == 3


DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_torch(dtype):
    def kernel(x):
        tile = nki.language.load(x)
        out = nki.language.ndarray(x.shape, dtype=x.dtype, buffer=nki.language.shared_hbm)
        nki.language.store(out, tile)
        return out

    x = (torch.arange(12).reshape(3, 4) % 2).to(dtype)
    got = nki.simulate(kernel)(x)
    assert got.dtype == dtype and torch.equal(got.float(), x.float())


def test_refused_arguments():
    for x in (torch.zeros(2, 2, dtype=torch.float64), np.zeros((2, 2), np.int64)):
        with pytest.raises(emulator.NkiValidationError, match="64-bit"):
            nki.simulate(lambda x: x)(x)
    with pytest.raises(emulator.NkiValidationError, match="empty"):
        nki.simulate(lambda x: x)(np.zeros((0, 2), np.float32))
    with pytest.raises(TypeError, match="returns tensors"):
        nki.simulate(lambda x: 3)(np.zeros((2, 2), np.float32))


def test_the_same_array_twice_is_one_tensor():
    def kernel(x, y):
        nki.language.store(x, nki.language.add(nki.language.load(y), 1.0))
        nki.language.store(y, nki.language.add(nki.language.load(x), 1.0))
        return y

    x = np.zeros((2, 2), np.float32)
    assert (nki.simulate(kernel)(x, x) == 2).all()


def test_read_only_and_requires_grad_arguments():
    def kernel(x):
        out = nki.language.ndarray(x.shape, dtype=x.dtype, buffer=nki.language.shared_hbm)
        nki.language.store(out, nki.language.load(x))
        return out

    frozen = np.ones((2, 2), np.float32)
    frozen.flags.writeable = False
    assert (nki.simulate(kernel)(frozen) == 1).all()
    assert (nki.simulate(kernel)(torch.ones(2, 2, requires_grad=True)) == 1).all()


def test_nested_arguments_and_results():
    def kernel(pair, table):
        return pair[0], {"second": table["x"]}

    x, y = np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)
    first, rest = nki.simulate(kernel)((x, y), {"x": y})
    assert first is x and rest["second"] is y


def test_collectives_import_and_refuse():
    from nki.collectives import ReplicaGroup, all_reduce

    assert ReplicaGroup([[0, 1]]).groups == ([[0, 1]],)
    with pytest.raises(NotImplementedError, match="all_reduce is not emulated"):
        nki.simulate(lambda x: all_reduce(x))(np.zeros((1, 1), np.float32))


def test_jit_arguments():
    assert isinstance(nki.jit(mode="trace")(lambda x: x), emulator.Kernel)
    config = nki.compiler.CompileConfig(address_rotation=True)
    assert isinstance(nki.jit(compile_config=config)(lambda x: x), emulator.Kernel)
    with pytest.raises(emulator.NkiValidationError, match="platform_target"):
        nki.jit(lambda x: x, platform_target="trn2")


def test_schedules_name_instructions():
    @nki.jit
    def kernel(x):
        tile = nki.language.load(x)
        nki.isa.tensor_copy(tile, tile, name="copied")
        nki.isa.dma_copy(x, tile, name="stored")
        return x

    x = np.ones((2, 2), np.float32)
    nki.simulate(kernel.with_schedule([("stored", "copied")])[1])(x)
    with pytest.raises(emulator.NkiValidationError, match="'missing'"):
        nki.simulate(kernel.with_schedule([("stored", ["copied", "missing"])]))(x)
