"""Cases of nki_conformance: attention of nki-library, for whole sequences, decoding and gradients."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from kdk_bench.nki_conformance_cases import Built, case
from kdk_bench.nki_conformance_library import BF16, SOURCE, reference, tensor, torch_module


@contextlib.contextmanager
def section_fields() -> Iterator[None]:
    """SectionParams with annotated fields, for one case: without, Python's dataclass gives it a constructor of no arguments.

    The parser front end would write one, but the kernel uses `is`, which that does not take.
    """
    module = importlib.import_module("nkilib.core.attention.attention_cte")
    original = module.SectionParams
    fields = {name: None for name in vars(original) if "section" in name}
    module.SectionParams = type("SectionParams", (module.nl.NKIObject,), fields)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.SectionParams = original  # type: ignore[attr-defined]


for _grid, _window in ((0, None), (2, None), (2, 128)):

    @case(
        "nki-library",
        f"attention_cte[{_grid or 1}, window {_window}, SectionParams annotated]",
        "nkilib.core.attention.attention_cte",
        "attention_cte",
        grid=_grid,
        tolerance=BF16,
        around=section_fields,
        **SOURCE,
    )
    def _attention(_: ModuleType, window: int | None = _window) -> Built:
        torch = torch_module()
        q, k, v = (tensor(2, 512, 128, seed=i, dtype="bfloat16") for i in range(3))
        q = q / 8
        scores = q.double() @ k.double().transpose(1, 2)
        row, column = torch.arange(512)[:, None], torch.arange(512)[None]
        hidden = (column > row) | (column <= row - window if window else torch.zeros(1, dtype=torch.bool))
        want = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v.double()
        return (q, k.transpose(1, 2).contiguous(), v), {"sliding_window": window}, want


@case("nki-library", "attention_bwd[2]", "nkilib.core.attention.attention_bwd", "attention_bwd", grid=2, tolerance=BF16, **SOURCE)
@case("nki-library", "attention_bwd", "nkilib.core.attention.attention_bwd", "attention_bwd", tolerance=BF16, **SOURCE)
def _attention_backward(module: ModuleType) -> Built:
    q, k, v, dy = (tensor(1, 2, 128, 512, seed=i) for i in range(4))
    o, lse, _ = reference(module, "attention_bwd_torch", "compute_o_lse")(q, k, v)
    want = reference(module, "attention_bwd_torch", "attention_bwd_torch_ref")(
        q, k, v, o, dy, lse, use_causal_mask=True, mixed_precision=True
    )
    return (q, k, v, o, dy, lse), {"use_causal_mask": True, "mixed_precision": True}, want


def decode_attention(module: ModuleType) -> Any:
    """attention_tkg with queries and keys in SBUF, which it asks for where it does not rotate them, and its own allocator."""
    import nki.isa as nisa  # type: ignore[import-not-found]
    import nki.language as nl  # type: ignore[import-not-found]

    utilities = {name: importlib.import_module(f"nkilib.core.utils.{name}") for name in ("allocator", "logging")}

    def attention(q: Any, k: Any, v: Any, k_prior: Any, v_prior: Any, mask: Any, config: Any) -> Any:
        out = nl.ndarray((config.bs, config.q_head, config.d_head, config.s_active), dtype=q.dtype, buffer=nl.shared_hbm)
        memory = utilities["allocator"].SbufManager(0, 200 * 1024, utilities["logging"].Logger("attention_tkg"))
        memory.open_scope()
        q_here, k_here = (memory.alloc_stack(t.shape, dtype=t.dtype, buffer=nl.sbuf) for t in (q, k))
        nisa.dma_copy(dst=q_here, src=q)
        nisa.dma_copy(dst=k_here, src=k)
        module.attention_tkg(q_here, k_here, v, k_prior, v_prior, mask, out, config, memory)
        memory.close_scope()
        return out

    return attention


for _batch, _heads, _new, _prior, _transposed, _grid in (
    (2, 4, 1, 256, True, 1),
    (2, 4, 1, 256, False, 1),
    (2, 4, 1, 256, True, 2),
    (1, 8, 4, 512, True, 2),
):

    @case(
        "nki-library",
        f"attention_tkg[{_grid}, batch {_batch}, {_heads} heads, {_new} new, {'keys transposed' if _transposed else 'keys in rows'}]",
        "nkilib.core.attention.attention_tkg",
        "attention_tkg",
        grid=_grid,
        tolerance=BF16,
        entry=decode_attention,
        **SOURCE,
    )
    def _attention_decode(
        module: ModuleType,
        batch: int = _batch,
        heads: int = _heads,
        new: int = _new,
        prior: int = _prior,
        transposed: bool = _transposed,
    ) -> Built:
        """The last positions of the cache's length stand for the new tokens; of the others the mask hides some."""
        torch = torch_module()
        q = tensor(batch, 128, heads, new, dtype="bfloat16") / 8
        k, v = tensor(batch, 128, new, seed=1, dtype="bfloat16"), tensor(batch, 1, new, 128, seed=2, dtype="bfloat16")
        k_prior, v_prior = (tensor(batch, 1, prior, 128, seed=i, dtype="bfloat16") for i in (3, 4))
        visible = torch.zeros(prior, batch, heads, new, dtype=torch.uint8)
        for b in range(batch):
            visible[: prior // 2 + 5 * b, b] = 1
        for i in range(new):
            visible[prior - new : prior - new + i + 1, :, :, i] = 1
        keys = torch.cat([k_prior[:, 0, : prior - new].transpose(1, 2), k], -1).double()
        values = torch.cat([v_prior[:, 0, : prior - new], v[:, 0]], 1).double()
        scores = torch.einsum("bdhs,bdp->bhsp", q.double(), keys)
        scores = scores.masked_fill(visible.permute(1, 2, 3, 0) == 0, float("-inf"))
        want = torch.einsum("bhsp,bpd->bhds", torch.softmax(scores, -1), values)
        config = module.AttnTKGConfig(
            bs=batch,
            q_head=heads,
            s_active=new,
            curr_sprior=prior,
            full_sprior=prior,
            d_head=128,
            tp_k_prior=not transposed,
            strided_mm1=transposed,
            qk_in_sb=True,
        )
        flat = (q.permute(1, 0, 2, 3).reshape(128, -1).contiguous(), k.permute(1, 0, 2).reshape(128, -1).contiguous())
        cache = k_prior.transpose(2, 3).contiguous() if transposed else k_prior
        return (*flat, v, cache, v_prior, visible, config), {}, want
