"""Cluster: the devices, their memory and rates, and the links between them; named, detected, or read from a file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from headway.errors import PlanError
from headway.units import format_bytes, format_rate, format_seconds, parse_bytes

GIB = 1 << 30
TERA = 1e12
GIGA = 1e9
LEAST_MEMORY = 1 << 20
"""Bytes; less is taken for a forgotten unit."""


@dataclass(frozen=True)
class Link:
    """A way between two ranks: `latency` in seconds, `bandwidth` in bytes/s in one direction."""

    latency: float
    bandwidth: float

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds that one message of `num_bytes` takes: latency + bytes / bandwidth."""
        return self.latency + num_bytes / self.bandwidth

    def describe(self) -> str:
        """Write the link as "1.2 GB/s, 40 us"."""
        return f"{format_rate(self.bandwidth)}, {format_seconds(self.latency)}"


@dataclass(frozen=True)
class Device:
    """One device: its memory in bytes, its peak rates in FLOP/s, and how much of each peak programs reach.

    `flops` is for float32 as torch multiplies by default (no TF32), `flops_half` for bfloat16 (float16 on a V100),
    dense. `bandwidth` is that of the device's memory, bytes/s. `efficiency` is the part of the peak FLOP/s that large
    matrix products reach, `bandwidth_efficiency` the part of the bandwidth that element-wise calls reach.
    `gap` is seconds of overhead for each call.
    """

    kind: str
    memory_bytes: int
    flops: float
    flops_half: float
    bandwidth: float
    efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    gap: float = 0.0
    source: str = ""

    @property
    def is_cpu(self) -> bool:
        """Whether the device is processor cores of a host."""
        return self.kind == "cpu"

    def rate(self, dtype: str) -> float:
        """Return the peak FLOP/s for a dtype: half for 16 bits, half of the float32 rate for float64."""
        if dtype in ("bfloat16", "float16"):
            return self.flops_half
        return self.flops / 2 if dtype in ("float64", "complex128") else self.flops


# Peaks are the vendor's, dense, for the SXM board; memory is what the driver reports as total (nvidia-smi), rounded.
# Links in one direction and per device: NVLink's figure is printed for both directions together. Networks: one NIC per
# device, as in the vendor's reference host. Efficiencies are round figures for large products: A100 and H100 runs of
# published training jobs reach 45 to 65 % of the peak over whole steps, single large products 70 to 80 %.
_DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        # NVIDIA V100 datasheet (2020): 15.7 TFLOPS, 125 TFLOPS tensor (fp16), 900 GB/s.
        "V100-16GB": Device(
            "V100-16GB", 16 * GIB, 15.7 * TERA, 125 * TERA, 900 * GIGA, 0.6, 0.8, 6e-6, "NVIDIA V100 datasheet, 2020"
        ),
        "V100-32GB": Device(
            "V100-32GB", 32 * GIB, 15.7 * TERA, 125 * TERA, 900 * GIGA, 0.6, 0.8, 6e-6, "NVIDIA V100 datasheet, 2020"
        ),
        # NVIDIA A100 datasheet (2021): 19.5 TFLOPS, 312 TFLOPS bf16, 1555 GB/s (40 GB), 2039 GB/s (80 GB).
        "A100-40GB": Device(
            "A100-40GB", 40 * GIB, 19.5 * TERA, 312 * TERA, 1555 * GIGA, 0.7, 0.8, 5e-6, "NVIDIA A100 datasheet, 2021"
        ),
        "A100-80GB": Device(
            "A100-80GB", 80 * GIB, 19.5 * TERA, 312 * TERA, 2039 * GIGA, 0.7, 0.8, 5e-6, "NVIDIA A100 datasheet, 2021"
        ),
        # NVIDIA H100 datasheet (2023), SXM: 67 TFLOPS, 989 TFLOPS bf16 dense, 3.35 TB/s.
        "H100": Device("H100", 80 * GIB, 67 * TERA, 989 * TERA, 3350 * GIGA, 0.65, 0.8, 5e-6, "NVIDIA H100 datasheet"),
        # NVIDIA H200 datasheet (2024), SXM: the H100's rates, 141 GB (140.4 GiB reported), 4.8 TB/s.
        "H200": Device("H200", 140 * GIB, 67 * TERA, 989 * TERA, 4800 * GIGA, 0.65, 0.8, 5e-6, "NVIDIA H200 datasheet"),
        # NVIDIA HGX B200 datasheet (2024), an eighth of the board: 75 TFLOPS, 2250 TFLOPS bf16 dense, 180 GB, 7.7 TB/s.
        "B200": Device(
            "B200", 179 * GIB, 75 * TERA, 2250 * TERA, 7700 * GIGA, 0.6, 0.8, 5e-6, "NVIDIA HGX B200 datasheet"
        ),
        # One process on two server cores with AVX; a stand-in until this machine has been measured.
        "cpu": Device("cpu", 0, 100 * GIGA, 100 * GIGA, 20 * GIGA, 0.7, 0.7, 5e-6, "round figure for two server cores"),
    }
)
_ALIASES: Mapping[str, str] = MappingProxyType({"v100": "V100-32GB", "a100": "A100-80GB"})

_INSIDE: Mapping[str, Link] = MappingProxyType(
    {
        "V100": Link(10e-6, 150 * GIGA),  # NVLink 2, 300 GB/s both directions
        "A100": Link(8e-6, 300 * GIGA),  # NVLink 3, 600 GB/s both directions
        "H100": Link(8e-6, 450 * GIGA),  # NVLink 4, 900 GB/s both directions
        "H200": Link(8e-6, 450 * GIGA),
        "B200": Link(8e-6, 900 * GIGA),  # NVLink 5, 1.8 TB/s both directions
        "cpu": Link(100e-6, 1 * GIGA),  # gloo over loopback, a round figure
    }
)
_BETWEEN: Mapping[str, Link] = MappingProxyType(
    {
        "V100": Link(20e-6, 12.5 * GIGA),  # 100 Gbit/s for each device
        "A100": Link(20e-6, 25 * GIGA),  # DGX A100: 200 Gbit/s HDR for each device
        "H100": Link(20e-6, 50 * GIGA),  # DGX H100: 400 Gbit/s NDR for each device
        "H200": Link(20e-6, 50 * GIGA),
        "B200": Link(20e-6, 50 * GIGA),
        "cpu": Link(200e-6, 1.25 * GIGA),  # 10 Gbit/s Ethernet
    }
)

_PATTERN = re.compile(r"^(?:(?P<first>\d+)x)?(?:(?P<second>\d+)x)?(?P<kind>[A-Za-z][\w-]*?)(?::(?P<memory>.+))?$")
_EXAMPLES = '"4xcpu:512MiB" (4 processes on one host), "2x8xH100" (hosts x devices x kind) or "8xA100-80GB:40GiB"'


@dataclass(frozen=True, init=False)
class Cluster:
    """Describe hosts of equal devices: `Cluster("4xcpu:512MiB")`, `Cluster("2x8xH100")`.

    The text is devices x kind or hosts x devices x kind, then `:` and the memory of each device in bytes with a unit.
    Links and device come from presets unless they are given. Raises PlanError for a text that names no machine.
    """

    hosts: int
    devices_per_host: int
    device: Device
    link_inside: Link  # between two ranks of a host
    link_between: Link  # between two ranks of different hosts
    measured: bool  # whether rates and links were measured on the machine, not looked up

    def __init__(
        self,
        text: str,
        *,
        device: Device | None = None,
        link_inside: Link | None = None,
        link_between: Link | None = None,
        measured: bool = False,
    ) -> None:
        hosts, devices, named = _parse(text)
        family = named.kind.partition("-")[0]
        for name, value in (
            ("hosts", hosts),
            ("devices_per_host", devices),
            ("device", device or named),
            ("link_inside", link_inside or _INSIDE[family]),
            ("link_between", link_between or _BETWEEN[family]),
            ("measured", measured),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def here(
        cls,
        num_processes: int,
        memory_bytes: int | None = None,
        *,
        num_hosts: int = 1,
        link: Link | None = None,
        link_between: Link | None = None,
        flops: float | None = None,
        bandwidth: float | None = None,
    ) -> Cluster:
        """Describe this machine's processor shared by `num_processes` ranks, or `num_hosts` such machines.

        `memory_bytes` is each rank's budget when it has one, else the memory now available is shared equally.
        `link` (inside a host), `link_between`, `flops` (float32 FLOP/s) and `bandwidth` (bytes/s) are what the caller
        measured. Raises ValueError when the hosts cannot have equally many processes.
        """
        each, rest = divmod(num_processes, num_hosts)
        if rest or each < 1:
            raise ValueError(f"{num_processes} processes cannot be shared equally by {num_hosts} hosts")
        memory = memory_bytes if memory_bytes is not None else available_memory() // each
        preset = _DEVICES["cpu"]
        device = replace(
            preset,
            memory_bytes=memory,
            flops=flops or preset.flops,
            flops_half=flops or preset.flops_half,
            bandwidth=bandwidth or preset.bandwidth,
            efficiency=1.0 if flops else preset.efficiency,
            bandwidth_efficiency=1.0 if bandwidth else preset.bandwidth_efficiency,
            source="measured here" if flops else preset.source,
        )
        return cls(
            f"{num_hosts}x{each}xcpu:{LEAST_MEMORY}B",
            device=device,
            link_inside=link,
            link_between=link_between,
            measured=link is not None,
        )

    @property
    def size(self) -> int:
        """Number of ranks: one for each device."""
        return self.hosts * self.devices_per_host

    @property
    def text(self) -> str:
        """The cluster in the form that the constructor reads, memory rounded: "2x8xH100:80GiB"."""
        hosts = f"{self.hosts}x" if self.hosts > 1 else ""
        memory = format_bytes(self.device.memory_bytes).replace(" ", "")
        return f"{hosts}{self.devices_per_host}x{self.device.kind}:{memory}"

    def host(self, rank: int) -> int:
        """Return the host of a rank; ranks fill one host after the other."""
        return rank // self.devices_per_host

    def link(self, ranks: Sequence[int]) -> Link:
        """Return the slowest link that a group of ranks talks over."""
        return self.link_inside if len({self.host(rank) for rank in ranks}) < 2 else self.link_between

    def describe(self) -> str:
        """Describe the cluster in one line."""
        what = "process" if self.device.is_cpu else "device"
        what += ("es" if self.device.is_cpu else "s") if self.size > 1 else ""
        host = f"{self.hosts} hosts" if self.hosts > 1 else "1 host"
        line = f"{self.size} {self.device.kind} {what} on {host}, {format_bytes(self.device.memory_bytes)}"
        if self.size == 1:
            return line
        line += " each"
        origin = "measured" if self.measured else "preset"
        line += f", links {self.link_inside.describe()}"
        return line + (f", between hosts {self.link_between.describe()}" if self.hosts > 1 else "") + f" ({origin})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that TOML can hold; `from_dict` reads them."""
        return {
            "hosts": self.hosts,
            "devices_per_host": self.devices_per_host,
            "measured": self.measured,
            "device": asdict(self.device),
            "link_inside": asdict(self.link_inside),
            "link_between": asdict(self.link_between),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cluster:
        """Read what `to_dict` returned."""
        device = Device(**values["device"])
        return cls(
            f"{values['hosts']}x{values['devices_per_host']}xcpu:{LEAST_MEMORY}B",
            device=device,
            link_inside=Link(**values["link_inside"]),
            link_between=Link(**values["link_between"]),
            measured=bool(values["measured"]),
        )


def available_memory() -> int:
    """Return the bytes of memory that this host has free for new processes."""
    import psutil

    return int(psutil.virtual_memory().available)


def _parse(text: str) -> tuple[int, int, Device]:
    match = _PATTERN.match(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise PlanError(f"{text!r} does not name a cluster", place="Cluster(...)", remedy=_EXAMPLES)
    first, second, kind, memory = match.group("first", "second", "kind", "memory")
    hosts = int(first) if second is not None else 1
    devices = int(second or first or 1)
    if hosts < 1 or devices < 1:
        raise PlanError(
            f"a cluster has at least one device, {text!r} says {hosts} x {devices}",
            place="Cluster(...)",
            remedy=_EXAMPLES,
        )
    return hosts, devices, _with_memory(_preset(kind, text), memory, devices, text)


def _preset(kind: str, text: str) -> Device:
    by_lower = {name.lower(): name for name in _DEVICES} | dict(_ALIASES)
    name = by_lower.get(kind.lower())
    if name is None:
        known = ", ".join(_DEVICES)
        raise PlanError(f"no device called {kind!r} is known", place=f"Cluster({text!r})", remedy=f"one of {known}")
    return _DEVICES[name]


def _with_memory(device: Device, memory: str | None, per_host: int, text: str) -> Device:
    if memory is None:
        # A processor has no memory of its own: named without one, its processes share what this host has.
        return replace(device, memory_bytes=available_memory() // per_host) if device.is_cpu else device
    try:
        size = parse_bytes(memory)
    except ValueError:
        raise PlanError(
            f"{memory!r} is not an amount of memory", place=f"Cluster({text!r})", remedy=_EXAMPLES
        ) from None
    if size < LEAST_MEMORY:
        raise PlanError(
            f"{format_bytes(size)} of memory is less than any process needs",
            place=f"Cluster({text!r})",
            remedy=f"a unit after the number: {_EXAMPLES}",
        )
    return replace(device, memory_bytes=size)
