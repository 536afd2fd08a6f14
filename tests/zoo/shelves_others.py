"""Shelves of smaller libraries: one architecture or idea each, tiny, for `make zoo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.zoo.shelves import Built, collect, floats, judged, lib

Shelf = Iterator[tuple[str, Callable[[], Built]]]


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def words(*shape: int, high: int = 50) -> torch.Tensor:
    return torch.randint(0, high, shape)


def wholes(model: nn.Module, batch: Any) -> torch.Tensor:
    """Mean squares of every output of the model for positional arguments."""
    return sum(out.square().mean() for out in floats(model(*batch)))  # type: ignore[return-value]


def said(model: nn.Module, batch: Any) -> torch.Tensor:
    """Take the loss that the model gives for positional arguments."""
    output = model(*batch)
    return output[0] if isinstance(output, tuple) else output


def of(module: str, kind: str, inputs: Callable[[], Any], loss: Any = wholes, **given: Any) -> Callable[[], Built]:
    return lambda: (getattr(lib(module), kind)(**given), loss, inputs())


def denoising_diffusion_pytorch() -> Shelf:
    d = "denoising_diffusion_pytorch"

    def diffusion(kind: str, unet: str = "Unet", **given: Any) -> Callable[[], Built]:
        def build() -> Built:
            net = getattr(lib(d), unet)(dim=8, dim_mults=(1, 2), flash_attn=False)
            return getattr(lib(d), kind)(net, image_size=16, **given), said, (torch.rand(2, 3, 16, 16),)

        return build

    yield "gaussian", diffusion("GaussianDiffusion", timesteps=10)
    yield "gaussian_v", diffusion("GaussianDiffusion", timesteps=10, objective="pred_v", offset_noise_strength=0.1)

    def one_dim() -> Built:
        net = lib(d).Unet1D(dim=8, dim_mults=(1, 2), channels=4)
        return lib(d).GaussianDiffusion1D(net, seq_length=16, timesteps=10), said, (torch.rand(2, 4, 16),)

    yield "one_dim", one_dim
    yield (
        "karras",
        of(
            f"{d}.karras_unet", "KarrasUnet", lambda: (r(2, 4, 16, 16), torch.rand(2)), image_size=16, dim=8,
            dim_max=16, num_downsamples=1, num_blocks_per_stage=1, attn_res=(8,), attn_dim_head=8, fourier_dim=4,
        ),
    )  # fmt: skip


def vector_quantize_pytorch() -> Shelf:
    v = "vector_quantize_pytorch"
    sizes = {"dim": 8, "codebook_size": 16}
    layers: dict[str, Callable[[Any], Any]] = {
        "vq": lambda m: m.VectorQuantize(**sizes, decay=0.8, commitment_weight=1.0),
        "vq_kmeans_cosine": lambda m: m.VectorQuantize(**sizes, use_cosine_sim=True, threshold_ema_dead_code=2),
        "vq_heads_learned": lambda m: m.VectorQuantize(**sizes, heads=2, separate_codebook_per_head=True),
        "vq_rotation": lambda m: m.VectorQuantize(**sizes, rotation_trick=True, orthogonal_reg_weight=1.0),
        "residual_vq": lambda m: m.ResidualVQ(**sizes, num_quantizers=3),
        "residual_dropout": lambda m: m.ResidualVQ(**sizes, num_quantizers=4, quantize_dropout=True),
        "fsq": lambda m: m.FSQ([4, 3, 3], dim=8),
        "lfq": lambda m: m.LFQ(dim=8, codebook_size=16, entropy_loss_weight=0.1),
        "sim_vq": lambda m: m.SimVQ(**sizes),
        "residual_fsq": lambda m: m.ResidualFSQ(dim=8, levels=[4, 3, 3], num_quantizers=2),
        "random_projection": lambda m: m.RandomProjectionQuantizer(
            dim=8, num_codebooks=2, codebook_dim=4, codebook_size=8
        ),
    }  # fmt: skip

    class Auto(nn.Module):
        def __init__(self, make: Callable[[Any], Any]) -> None:
            super().__init__()
            self.enc, self.dec = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8)), nn.Linear(8, 6)
            self.quantise = make(lib(v))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, *rest = outs if isinstance(outs := self.quantise(self.enc(x)), tuple) else (outs,)
            total = sum(out.sum() for out in floats(rest))
            h = self.dec(h) if h.is_floating_point() else self.dec(self.enc(x))
            return F.mse_loss(h, x) + 0.1 * total

    for name, make in layers.items():
        yield name, lambda m=make: (Auto(m), said, (r(2, 12, 6),))


def performer_pytorch() -> Shelf:
    p, sizes = "performer_pytorch", {"dim": 16, "depth": 2, "heads": 2, "dim_head": 8}
    text = {"num_tokens": 50, "max_seq_len": 16} | sizes
    yield "performer", of(p, "Performer", lambda: (r(2, 16, 16),), **sizes)
    yield "lm", of(p, "PerformerLM", lambda: (words(2, 16),), **text)
    yield "reversible", of(p, "PerformerLM", lambda: (words(2, 16),), **text, reversible=True, use_scalenorm=True)
    yield "kernel", of(p, "PerformerLM", lambda: (words(2, 16),), **text, generalized_attention=True, ff_glu=True)


def reformer_pytorch() -> Shelf:
    sizes = {"dim": 16, "depth": 2, "heads": 2, "bucket_size": 4, "n_hashes": 2}
    text = {"num_tokens": 50, "max_seq_len": 16, "causal": True} | sizes
    yield "lm", of("reformer_pytorch", "ReformerLM", lambda: (words(2, 16),), **text)
    yield "lm_full", of("reformer_pytorch", "ReformerLM", lambda: (words(2, 16),), **text, use_full_attn=True)


def linformer() -> Shelf:
    sizes = {"dim": 16, "seq_len": 16, "depth": 3, "k": 4, "heads": 2}
    yield "linformer", of("linformer", "Linformer", lambda: (r(2, 16, 16),), **sizes)
    text = sizes | {"num_tokens": 50}
    yield "reversible", of("linformer", "LinformerLM", lambda: (words(2, 16),), **text, reversible=True)
    yield "lm", of("linformer", "LinformerLM", lambda: (words(2, 16),), **text, share_kv=True)


def perceiver_pytorch() -> Shelf:
    sizes = {"num_latents": 6, "latent_dim": 16, "cross_heads": 1, "latent_heads": 2, "cross_dim_head": 8}
    sizes |= {"latent_dim_head": 8}
    yield (
        "perceiver",
        of(
            "perceiver_pytorch", "Perceiver", lambda: (r(2, 8, 8, 3),), **sizes, input_channels=3, input_axis=2,
            num_freq_bands=2, max_freq=4.0, depth=3, num_classes=5, weight_tie_layers=True,
        ),
    )  # fmt: skip
    yield ("io", of("perceiver_pytorch", "PerceiverIO", lambda: (r(2, 10, 8),), **sizes, dim=8, queries_dim=8, depth=2))
    yield (
        "lm",
        of(
            "perceiver_pytorch", "PerceiverLM", lambda: (words(2, 12),), **sizes, num_tokens=50, dim=8, max_seq_len=12,
            depth=2,
        ),
    )  # fmt: skip


def tab_transformer_pytorch() -> Shelf:
    table = {"categories": (4, 3, 5), "num_continuous": 3, "dim": 8, "dim_out": 1, "depth": 2, "heads": 2}
    columns = lambda: (words(4, 3, high=3), r(4, 3))  # noqa: E731
    yield "tab", of("tab_transformer_pytorch", "TabTransformer", columns, **table, mlp_act=nn.ReLU())
    yield "ft", of("tab_transformer_pytorch", "FTTransformer", columns, **table)


def egnn_pytorch() -> Shelf:
    yield "egnn", of("egnn_pytorch", "EGNN", lambda: (r(2, 6, 8), r(2, 6, 3)), dim=8)
    near = {"dim": 8, "depth": 3, "num_nearest_neighbors": 3, "num_tokens": 20}
    yield "network", of("egnn_pytorch", "EGNN_Network", lambda: (words(2, 6, high=20), r(2, 6, 3)), **near)


def e3nn() -> Shelf:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            o3, nets = lib("e3nn.o3"), lib("e3nn.nn")
            self.harmonic = o3.Irreps.spherical_harmonics(2)
            self.mid = o3.Irreps("4x0e + 4x1o")
            self.first = o3.FullyConnectedTensorProduct("4x0e", self.harmonic, self.mid, shared_weights=False)
            self.weights = nets.FullyConnectedNet([3, 8, self.first.weight_numel], torch.tanh)
            self.gate = nets.Gate("2x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o")
            self.mix, self.out = o3.Linear(self.mid, self.gate.irreps_in), o3.Linear(self.gate.irreps_out, "1x0e")

        def forward(self, x: torch.Tensor, place: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            source, target = edges
            between = place[source] - place[target]
            waves = lib("e3nn.o3").spherical_harmonics(self.harmonic, between, True, normalization="component")
            far = torch.stack([between.norm(dim=-1) ** k for k in range(3)], -1)
            sent = self.first(x[source], waves, self.weights(far))
            total = x.new_zeros(len(x), sent.shape[1]).index_add(0, target, sent)
            return self.out(self.gate(self.mix(total))).sum()

    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])
    yield "convolution", lambda: (Net(), wholes, (r(6, 4), r(6, 3), edges))


def snntorch() -> Shelf:
    class Spiking(nn.Module):
        def __init__(self, kind: str, **given: Any) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
            self.a, self.b = (getattr(lib("snntorch"), kind)(beta=0.9, **given) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, two = self.a.init_leaky(), self.b.init_leaky()
            seen = []
            for t in range(x.shape[1]):
                spikes, one = self.a(self.inner(x[:, t]), one)
                _, two = self.b(self.out(spikes), two)
                seen.append(two)
            return torch.stack(seen)

    yield "leaky", lambda: (Spiking("Leaky"), wholes, (2 * r(3, 5, 6),))
    yield "learned", lambda: (Spiking("Leaky", learn_beta=True, learn_threshold=True), wholes, (2 * r(3, 5, 6),))


def pytorch_tabnet() -> Shelf:
    def net(kind: str, **given: Any) -> Callable[[], Built]:
        def build() -> Built:
            made = getattr(lib("pytorch_tabnet.tab_network"), kind)(
                6, 3, n_d=4, n_a=4, n_steps=3, cat_idxs=[1], cat_dims=[3], cat_emb_dim=[2], virtual_batch_size=4,
                group_attention_matrix=torch.eye(6), **given,
            )  # fmt: skip
            return made, wholes, (torch.cat([r(8, 1), words(8, 1, high=3).float(), r(8, 4)], 1),)

        return build

    yield "sparsemax", net("TabNet")
    yield "entmax", net("TabNet", mask_type="entmax")


def mambapy() -> Shelf:
    for name, scan in (("parallel", True), ("sequential", False)):
        make = lambda s=scan: lib("mambapy.mamba").Mamba(  # noqa: E731
            lib("mambapy.mamba").MambaConfig(d_model=8, n_layers=3, d_state=4, pscan=s)
        )
        yield name, lambda m=make: (m(), wholes, (r(2, 8, 8),))


def ncps() -> Shelf:
    yield "cfc", of("ncps.torch", "CfC", lambda: (r(2, 6, 4),), input_size=4, units=8)

    def wired(kind: str) -> Built:
        wiring = lib("ncps.wirings").AutoNCP(10, 3)
        return getattr(lib("ncps.torch"), kind)(4, wiring), wholes, (r(2, 6, 4),)

    yield "ltc", lambda: wired("LTC")
    yield "cfc_wired", lambda: wired("CfC")


def titans_pytorch() -> Shelf:
    sizes = {"dim": 16, "chunk_size": 4, "heads": 2, "dim_head": 8}
    yield "memory", of("titans_pytorch", "NeuralMemory", lambda: (r(2, 8, 16),), **sizes)


def MEGABYTE_pytorch() -> Shelf:  # noqa: N802
    sizes = {"num_tokens": 50, "dim": (16, 8), "depth": (2, 2), "max_seq_len": (4, 4), "dim_head": 8, "heads": 2}
    yield (
        "bytes",
        lambda: (
            lib("MEGABYTE_pytorch").MEGABYTE(**sizes),
            lambda m, b: m(b, return_loss=True),
            words(2, 16),
        ),
    )


def litgpt() -> Shelf:
    def gpt(**given: Any) -> Callable[[], Built]:
        sizes = {"n_layer": 3, "n_head": 4, "n_embd": 16, "block_size": 16, "padded_vocab_size": 60, "vocab_size": 50}

        def build() -> Built:
            made = lib("litgpt.model").GPT(lib("litgpt.config").Config(**(sizes | given)))
            loss = lambda m, b: F.cross_entropy(m(b[:, :-1]).flatten(0, 1), b[:, 1:].flatten())  # noqa: E731
            return made, loss, words(2, 13)

        return build

    yield "neox", gpt()
    yield "llama", gpt(norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", n_query_groups=2, intermediate_size=24)
    yield (
        "gemma",
        gpt(norm_class_name="RMSNorm", mlp_class_name="GemmaMLP", intermediate_size=24, scale_embeddings=True),
    )
    yield "moe", gpt(mlp_class_name="LLaMAMoE", n_expert=4, n_expert_per_token=2, intermediate_size=24)


def deepctr_torch() -> Shelf:
    def net(kind: str) -> Callable[[], Built]:
        def build() -> Built:
            inputs = lib("deepctr_torch.inputs")
            features = [inputs.SparseFeat(f"c{i}", 10, embedding_dim=4) for i in range(3)]
            features += [inputs.DenseFeat("d", 2)]
            made = getattr(lib("deepctr_torch.models"), kind)(features, features)
            return made, wholes, (torch.cat([words(4, 3, high=10).float(), r(4, 2)], 1),)

        return build

    for kind in ("DeepFM", "xDeepFM", "AutoInt", "WDL", "NFM", "DCNMix", "FiBiNET"):
        yield kind.lower(), net(kind)


def braindecode() -> Shelf:
    sizes = {"n_chans": 6, "n_outputs": 10, "n_times": 400, "sfreq": 100}
    kinds = "EEGNet ShallowFBCSPNet Deep4Net EEGConformer ATCNet EEGInceptionMI SleepStagerChambon2018 FBCNet TIDNet"
    for kind in kinds.split():
        yield (
            kind.lower(),
            lambda k=kind: (
                getattr(lib("braindecode.models"), k)(**sizes), judged, {"x": r(2, 6, 400), "y": words(2, high=10)},
            ),
        )  # fmt: skip


def kornia() -> Shelf:
    yield "hardnet", lambda: (lib("kornia.feature").HardNet(False), wholes, (torch.rand(4, 1, 32, 32),))
    yield "sosnet", lambda: (lib("kornia.feature").SOSNet(False), wholes, (torch.rand(4, 1, 32, 32),))
    yield "hynet", lambda: (lib("kornia.feature").HyNet(False), wholes, (torch.rand(4, 1, 32, 32),))


def torchaudio() -> Shelf:
    m = "torchaudio.models"
    lengths = lambda: torch.tensor([20, 16])  # noqa: E731
    yield (
        "conformer",
        of(
            m, "Conformer", lambda: (r(2, 20, 8), lengths()), input_dim=8, num_heads=2, ffn_dim=16, num_layers=3,
            depthwise_conv_kernel_size=3,
        ),
    )  # fmt: skip
    yield (
        "emformer",
        of(
            m, "Emformer", lambda: (r(2, 18, 8), torch.tensor([16, 16])), input_dim=8, num_heads=2, ffn_dim=16,
            num_layers=3, segment_length=4, right_context_length=2, left_context_length=4, max_memory_size=2,
        ),
    )  # fmt: skip
    yield "deepspeech", of(m, "DeepSpeech", lambda: (r(2, 1, 10, 8),), n_feature=8, n_hidden=12, n_class=5)
    yield "wav2letter", of(m, "Wav2Letter", lambda: (r(2, 8, 60),), num_classes=6, input_type="mfcc", num_features=8)
    yield (
        "conv_tasnet",
        of(
            m, "ConvTasNet", lambda: (r(2, 1, 200),), num_sources=2, enc_kernel_size=8, enc_num_feats=8,
            msk_kernel_size=3, msk_num_feats=8, msk_num_hidden_feats=12, msk_num_layers=2, msk_num_stacks=2,
        ),
    )  # fmt: skip
    yield (
        "wavernn",
        of(
            m, "WaveRNN", lambda: (r(2, 1, 4 * 4), r(2, 1, 8, 8)), upsample_scales=[2, 2], n_classes=8, hop_length=4,
            n_res_block=2, n_rnn=8, n_fc=8, kernel_size=5, n_freq=8, n_hidden=8, n_output=8,
        ),
    )  # fmt: skip
    yield (
        "hdemucs",
        of(m, "HDemucs", lambda: (r(1, 2, 4096),), sources=["a", "b"], audio_channels=2, channels=8, nfft=256, depth=3),
    )


FAMILIES = collect(
    denoising_diffusion_pytorch, vector_quantize_pytorch, performer_pytorch, reformer_pytorch, linformer,
    perceiver_pytorch, tab_transformer_pytorch, egnn_pytorch, e3nn, snntorch, pytorch_tabnet, mambapy, ncps,
    titans_pytorch, MEGABYTE_pytorch, litgpt, deepctr_torch, braindecode, kornia, torchaudio,
)  # fmt: skip
