"""Shelves: families of timm, torchvision, diffusers and other libraries beyond the given zoo, tiny, for `make zoo`.

Each is (model, loss, batch). A library that is not installed is left out (docs/graph.md says which are wanted).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves

Built = tuple[nn.Module, Callable[[nn.Module, Any], Any], Any]


def lib(name: str) -> Any:
    """Import a library when a family is built."""
    return importlib.import_module(name)


def floats(output: Any) -> list[torch.Tensor]:
    """List the floating tensors of an output."""
    if hasattr(output, "__dict__") and not isinstance(output, torch.Tensor | dict):
        output = dict(vars(output))
    return [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def judged(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy of every output that says classes (or classes for each pixel) of x."""
    return sum(F.cross_entropy(out, batch["y"]) for out in floats(model(batch["x"])))  # type: ignore[return-value]


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    """Mean squares of every output of the model for keyword arguments."""
    return sum(out.square().mean() for out in floats(model(**batch)))  # type: ignore[return-value]


def told(model: nn.Module, batch: Any) -> torch.Tensor:
    """Take the loss that the model gives."""
    output = model(**batch)
    return output[0] if isinstance(output, tuple) else output


def picture(make: Callable[[], nn.Module], size: int = 64, **sizes: int) -> Callable[[], Built]:
    channels, samples = sizes.get("channels", 3), sizes.get("samples", 2)
    return lambda: (
        make(),
        judged,
        {"x": torch.randn(samples, channels, size, size), "y": torch.randint(0, 10, (samples,))},
    )


def pixels(make: Callable[[], nn.Module], size: int = 64, dims: int = 2, channels: int = 3) -> Callable[[], Built]:
    shape = [size] * dims
    samples = 2 if dims == 2 else 1
    return lambda: (
        make(),
        judged,
        {"x": torch.randn(samples, channels, *shape), "y": torch.randint(0, 3, (samples, *shape))},
    )


TIMM = (
    "resnet26d 64; mobilenetv3_small_050 64; efficientnet_lite0 64; ghostnet_050 64; hrnet_w18_small 64; "
    "densenet121 64; res2net50_14w_8s 64; selecsls42 64; skresnet18 64; xception41 96; cspresnet50 64; "
    "mvitv2_tiny 64; poolformer_s12 64; edgenext_xx_small 64; mobilevit_xxs 64; mobileone_s0 64; efficientvit_b0 64; "
    "lcnet_035 64; tinynet_e 64; mixer_s32_224 64 img_size=64; visformer_tiny 64 img_size=64; "
    "deit_tiny_patch16_224 64 img_size=64; eva02_tiny_patch14_224 56 img_size=56; volo_d1_224 64 img_size=64; "
    "hardcorenas_a 64; gernet_s 64; resnest14d 64; focalnet_tiny_srf 64; convit_tiny 64 img_size=64; starnet_s1 64; "
    "hgnetv2_b0 64; fasternet_t0 64; shvit_s1 64; tiny_vit_5m_224 64; swiftformer_xs 64; "
    "mobilenetv4_conv_small 64; test_vit 160; test_efficientnet 64; test_byobnet 64; test_convnext 64; "
    "sequencer2d_s 64 img_size=64; efficientformerv2_s0 64 img_size=64; gcvit_xxtiny 224; swin_tiny_patch4_window7_224 "
    "64 img_size=64; maxvit_rmlp_pico_rw_256 64 img_size=64; nf_resnet26 64; repghostnet_050 64; "
    "beit_base_patch16_224 32 img_size=32 depth=3"
)


def timm() -> Iterator[tuple[str, Callable[[], Built]]]:
    for entry in TIMM.split("; "):
        name, size, *options = entry.split()
        given = {key: int(value) for key, value in (option.split("=") for option in options)}
        make = lambda n=name, g=given: lib("timm").create_model(n, num_classes=10, **g)  # noqa: E731
        yield name, picture(make, int(size))


def torchvision() -> Iterator[tuple[str, Callable[[], Built]]]:
    models = lambda: lib("torchvision.models")  # noqa: E731
    for name, size in {
        "densenet121": 64,
        "googlenet": 64,
        "inception_v3": 96,
        "efficientnet_b0": 64,
        "regnet_y_400mf": 64,
        "resnext50_32x4d": 64,
        "convnext_tiny": 64,
        "swin_t": 64,
        "swin_v2_t": 64,
        "mobilenet_v3_large": 64,
        "wide_resnet50_2": 64,
    }.items():
        aux = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
        yield name, picture(lambda n=name, a=aux: getattr(models(), n)(num_classes=10, **a), size)
    for name in ("fcn_resnet50", "lraspp_mobilenet_v3_large", "deeplabv3_resnet50"):
        given = {"weights": None, "weights_backbone": None, "num_classes": 3}
        yield name, pixels(lambda n=name, g=given: getattr(models().segmentation, n)(**g))
    clip = lambda: {"x": torch.randn(2, 3, 8, 32, 32), "y": torch.randint(0, 10, (2,))}  # noqa: E731
    for name in ("r3d_18", "mc3_18", "r2plus1d_18"):
        yield name, lambda n=name: (getattr(models().video, n)(num_classes=10), judged, clip())


def vit_pytorch() -> Iterator[tuple[str, Callable[[], Built]]]:
    base = {"image_size": 64, "patch_size": 16, "num_classes": 10, "dim": 32, "depth": 4, "heads": 4, "mlp_dim": 64}
    few = {k: v for k, v in base.items() if k not in ("patch_size", "mlp_dim")}
    for name, module, kind, options in (
        ("deepvit", "deepvit", "DeepViT", base),
        ("cait", "cait", "CaiT", base | {"cls_depth": 2}),
        ("pit", "pit", "PiT", base | {"depth": (1, 1, 2)}),
        (
            "levit",
            "levit",
            "LeViT",
            {"image_size": 64, "num_classes": 10, "dim": (16, 32, 32), "depth": 1, "heads": (2, 2, 4), "mlp_mult": 2},
        ),
        ("cvt", "cvt", "CvT", {"num_classes": 10, "s1_emb_dim": 16, "s2_emb_dim": 32, "s3_emb_dim": 32, "s3_depth": 2}),
        (
            "nest",
            "nest",
            "NesT",
            few
            | {"patch_size": 4, "num_hierarchies": 3, "block_repeats": (1, 1, 1), "dim": 16, "heads": 2}
            | {"depth": None},
        ),
        (
            "mobile_vit",
            "mobile_vit",
            "MobileViT",
            {
                "image_size": (64, 64),
                "dims": [16, 24, 32],
                "channels": [8, 8, 16, 16, 24, 24, 32, 32, 32, 32, 64],
                "num_classes": 10,
            },
        ),
        ("xcit", "xcit", "XCiT", base | {"cls_depth": 2}),
        ("parallel_vit", "parallel_vit", "ViT", base | {"num_parallel_branches": 2}),
        ("register", "simple_vit_with_register_tokens", "SimpleViT", base),
        ("qk_norm", "simple_vit_with_qk_norm", "SimpleViT", base),
        ("fft", "simple_vit_with_fft", "SimpleViT", base | {"freq_patch_size": 8}),
        (
            "scalable",
            "scalable_vit",
            "ScalableViT",
            {
                "num_classes": 10,
                "dim": 16,
                "heads": (1, 2, 2, 2),
                "depth": (1, 1, 1, 1),
                "ssa_dim_key": 8,
                "ssa_dim_value": 8,
                "reduction_factor": (2, 2, 1, 1),
                "window_size": (4, 2, None, None),
            },
        ),
        (
            "max_vit",
            "max_vit",
            "MaxViT",
            {"num_classes": 10, "dim": 16, "dim_conv_stem": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4},
        ),
        ("small", "vit_for_small_dataset", "ViT", base),
    ):
        given = {key: value for key, value in options.items() if value is not None}
        yield name, picture(lambda m=module, k=kind, g=given: getattr(lib(f"vit_pytorch.{m}"), k)(**g))


def pytorchcv() -> Iterator[tuple[str, Callable[[], Built]]]:
    names = "resnet10 preresnet10 condensenet74_c4_g4 airnet50_1x64d_r16 menet108_8x1_g3 igcv3_wd4 peleenet vovnet27s"
    for name in names.split():
        given = {"num_classes": 10, "pretrained": False, "in_size": (224, 224)}
        yield name, picture(lambda n=name, g=given: lib("pytorchcv.model_provider").get_model(n, **g), 224)
    for name in (
        "pyramidnet110_a48_cifar10",
        "resnet20_cifar10",
        "nin_cifar10",
        "rir_cifar10",
        "shakeshakeresnet20_2x16d_cifar10",
    ):
        yield name, picture(lambda n=name: lib("pytorchcv.model_provider").get_model(n, pretrained=False), 32)


def segmentation_models_pytorch() -> Iterator[tuple[str, Callable[[], Built]]]:
    for name in ("Unet", "MAnet", "PSPNet", "DeepLabV3"):
        given: dict[str, Any] = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 3}
        yield name, pixels(lambda n=name, g=given: getattr(lib("segmentation_models_pytorch"), n)(**g))
    for encoder in (
        "mobilenet_v2",
        "efficientnet-b0",
        "timm-regnetx_002",
        "densenet121",
        "dpn68",
        "mit_b0",
        "mobileone_s0",
    ):
        given = {"encoder_name": encoder, "encoder_weights": None, "classes": 3}
        yield f"Unet_{encoder}", pixels(lambda g=given: lib("segmentation_models_pytorch").Unet(**g))


def collect(*shelves: Callable[[], Iterator[tuple[str, Callable[[], Built]]]]) -> dict[str, Callable[[], Built]]:
    """Name families "library name", for the libraries that are installed."""
    found = {}
    for shelf in shelves:
        if importlib.util.find_spec(shelf.__name__) is not None:
            found.update({f"{shelf.__name__} {name}": build for name, build in shelf()})
    return found


FAMILIES = collect(timm, torchvision, vit_pytorch, pytorchcv, segmentation_models_pytorch)
