"""Architectures of many kinds, built small from their libraries with random weights: each a factory for `kdk audit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[Any, ...]
TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
DECODER = {**TEXT, "intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 64}


def ids(length: int = 16) -> Tensor:
    return torch.randint(3, 128, (2, length))


def causal(name: str, **values: Any) -> Made:
    """A language model of transformers with its own loss."""
    import transformers

    config = transformers.AutoConfig.for_model(name, **{**DECODER, **values})
    tokens = ids()
    return transformers.AutoModelForCausalLM.from_config(config), (), {"input_ids": tokens, "labels": tokens, "use_cache": False}


def llama() -> Made:
    return causal("llama")


def mistral_window() -> Made:
    return causal("mistral", sliding_window=8)


def qwen3() -> Made:
    return causal("qwen3", head_dim=16)


def qwen3_moe() -> Made:
    return causal("qwen3_moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def mixtral() -> Made:
    return causal("mixtral", num_local_experts=4, num_experts_per_tok=2)


def deepseek_v3() -> Made:
    return causal(
        "deepseek_v3", num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1,
    )  # fmt: skip


def gemma2() -> Made:
    return causal("gemma2", head_dim=16, sliding_window=8, attn_implementation="eager")


def gemma3() -> Made:
    return causal("gemma3_text", head_dim=16, sliding_window=8)


def gpt_oss() -> Made:
    return causal("gpt_oss", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)


def phi3() -> Made:
    return causal("phi3", pad_token_id=0)


def glm() -> Made:
    return causal("glm", head_dim=16, pad_token_id=0)


def gpt_neox() -> Made:
    return causal("gpt_neox")


def gptj() -> Made:
    return causal("gptj", n_embd=64, n_layer=2, n_head=4, n_inner=128, rotary_dim=8, n_positions=64)


def cohere() -> Made:
    return causal("cohere", pad_token_id=0)


def gpt2() -> Made:
    return causal("gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=64)


def mamba() -> Made:
    return causal("mamba", state_size=4, intermediate_size=128, time_step_rank=4)


def mamba2() -> Made:
    return causal("mamba2", state_size=8, num_heads=8, head_dim=16, n_groups=1, chunk_size=8)


def qwen3_next() -> Made:
    return causal(
        "qwen3_next", head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip


def rwkv() -> Made:
    return causal("rwkv", attention_hidden_size=64, context_length=16)


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, vocab_size=128, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config), (), {"input_ids": ids(), "labels": ids(8)}


def bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**TEXT, intermediate_size=128)), (), {"input_ids": ids(), "labels": ids()}


def whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=128, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=32, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config), (), {"input_features": torch.randn(2, 8, 64), "labels": ids(6)}


def wav2vec2_ctc() -> Made:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=16, conv_dim=(16, 16),
        conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0, ctc_loss_reduction="mean", pad_token_id=0,
    )  # fmt: skip
    return Wav2Vec2ForCTC(config), (), {"input_values": torch.randn(2, 800), "labels": torch.randint(1, 16, (2, 4))}


def clip() -> Made:
    from transformers import CLIPConfig, CLIPModel

    text = {**TEXT, "intermediate_size": 128, "max_position_embeddings": 32, "projection_dim": 32}
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
    return CLIPModel(config), (), {"input_ids": ids(), "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True}


def dinov2() -> Made:
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=56, patch_size=14)
    return Dinov2Model(config), (torch.randn(2, 3, 70, 84),), {}


def convnext() -> Made:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[16, 32, 32, 32], depths=[1, 1, 1, 1], num_labels=5)
    return ConvNextForImageClassification(config), (torch.randn(2, 3, 64, 64),), {"labels": torch.tensor([1, 2])}


def swin() -> Made:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=5)
    return SwinForImageClassification(config), (torch.randn(2, 3, 32, 32),), {"labels": torch.tensor([1, 2])}


def resnet() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=5)
    return ResNetForImageClassification(config), (torch.randn(2, 3, 64, 64),), {"labels": torch.tensor([1, 2])}


def deformable_detr() -> Made:
    from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 16, 16, 16], depths=[1, 1, 1, 1], out_features=["stage2", "stage3", "stage4"]
    )
    config = DeformableDetrConfig(
        use_timm_backbone=False, backbone=None, backbone_config=backbone, use_pretrained_backbone=False, d_model=32, encoder_layers=1,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=10,
        num_labels=4,
    )  # fmt: skip
    labels = [{"class_labels": torch.tensor([1]), "boxes": torch.rand(1, 4) * 0.5} for _ in range(2)]
    return DeformableDetrForObjectDetection(config), (torch.randn(2, 3, 64, 64),), {"labels": labels}


def diffusion_unet() -> Made:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return model, (torch.randn(2, 4, 16, 16), torch.tensor([3, 7]), torch.randn(2, 5, 32)), {}, lambda out: out.sample.square().mean()


def diffusion_transformer() -> Made:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, num_embeds_ada_norm=10
    )
    arguments = {"timestep": torch.tensor([3, 7]), "class_labels": torch.tensor([1, 2])}
    return model, (torch.randn(2, 4, 8, 8),), arguments, lambda out: out.sample.square().mean()


def vae() -> Made:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    return model, (torch.randn(1, 3, 32, 32),), {}, lambda out: out.sample.square().mean()


class Graph(nn.Module):
    """Two layers of a graph network."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import torch_geometric.nn as pyg

        layer = getattr(pyg, kind)
        self.first, self.second = layer(8, 16), layer(16, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x, edges)), edges)  # type: ignore[no-any-return]


def gat() -> Made:
    return Graph("GATConv"), (torch.randn(20, 8), torch.randint(0, 20, (2, 60))), {}


def graph_sage() -> Made:
    return Graph("SAGEConv"), (torch.randn(20, 8), torch.randint(0, 20, (2, 60))), {}


class Recommender(nn.Module):
    """DLRM's shape: bags of sparse features, dense features, pairwise products."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.bottom, self.top = nn.Linear(4, 8), nn.Linear(8 + 6, 1)

    def forward(self, dense: Tensor, sparse: Tensor, offsets: Tensor) -> Tensor:
        rows = [self.bottom(dense).relu(), *(table(sparse, offsets) for table in self.tables)]
        stacked = torch.stack(rows, 1)
        at = torch.triu_indices(4, 4, 1)
        pairs = torch.bmm(stacked, stacked.mT)[:, at[0], at[1]]
        return torch.sigmoid(self.top(torch.cat([rows[0], pairs], 1)))


def dlrm() -> Made:
    return Recommender(), (torch.randn(4, 4), torch.randint(0, 50, (12,)), torch.arange(0, 12, 3)), {}


class Sampler(nn.Module):
    """Top-k, top-p and a draw, as generation loops do it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 64)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(hidden)
        logits = logits.masked_fill(logits < logits.topk(20)[0][..., -1:], float("-inf"))
        values, order = torch.sort(logits, descending=True)
        probabilities = values.softmax(-1)
        cut = probabilities.cumsum(-1) - probabilities > 0.9
        values = values.masked_fill(cut, float("-inf"))
        kept = torch.full_like(logits, float("-inf")).scatter(-1, order, values)
        drawn = torch.multinomial(kept.softmax(-1), 1)
        return drawn, logits.logsumexp(-1)


def sampler() -> Made:
    return Sampler(), (torch.randn(4, 16),), {}, lambda out: out[1].sum()


class Recurrent(nn.Module):
    """An LSTM, and a scan written as a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gate = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        a = torch.sigmoid(self.gate(y))
        state = torch.zeros_like(y[:, 0])
        states = []
        for t in range(y.shape[1]):
            state = a[:, t] * state + y[:, t]
            states.append(state)
        return torch.stack(states, 1)


def recurrent() -> Made:
    return Recurrent(), (torch.randn(2, 12, 8),), {}


class Generate(nn.Module):
    """transformers' generate() as a model's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()[0]

    def forward(self, tokens: Tensor) -> Tensor:
        produced = self.model.generate(tokens, max_new_tokens=3, do_sample=True, top_p=0.9, top_k=10, pad_token_id=0)
        return self.model(produced).logits  # type: ignore[no-any-return]


def generate() -> Made:
    return Generate(), (ids(4),), {}


ARCHITECTURES: tuple[Callable[[], Made], ...] = (
    llama, mistral_window, qwen3, qwen3_moe, mixtral, deepseek_v3, gemma2, gemma3, gpt_oss, phi3, glm, gpt_neox, gptj, cohere, gpt2, mamba,
    mamba2, qwen3_next, rwkv, t5, bert, whisper, wav2vec2_ctc, clip, dinov2, convnext, swin, resnet, deformable_detr, diffusion_unet,
    diffusion_transformer, vae, gat, graph_sage, dlrm, sampler, recurrent, generate,
)  # fmt: skip
