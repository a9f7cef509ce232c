"""Engines that do half of the work: one runs prompts and gives their pages away, the other decodes from such pages.

A page travels as [heads, planes, page_size, head_dim]: plane 2 * layer holds the keys of a layer, the next one its
values, and the multi-token-prediction head's layer comes last.

Over several processes each has the pages of its own devices in a staging buffer of its own. The first says besides
which slots of the buffers a call's pages belong in, and the others acknowledge what they have put there or taken out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import jax
import numpy as np

from qwenjax.engine.engine import Engine
from qwenjax.kv_transfer import KVLayout
from qwenjax.mesh import MODEL

# Of layers in a prefill. What the last group leaves to send is a quarter of a call's pages: of 8,192 tokens of
# Qwen3-30B-A3B 0.2 GB, 2 ms between two H200s. Each group costs launches, and messages and a read for every prompt.
_MOST_GROUPS = 4
PAGES_PER_COPY = (4, 16)  # that one program takes out of the cache, or puts into it: short prompts need few


def kv_layout(engine: Engine) -> KVLayout:
    """How each data rank of an engine holds pages."""
    return KVLayout(engine.model.config.num_key_value_heads, engine.config.page_size, engine.model.mesh.shape[MODEL])


def num_processes(engine: Engine) -> int:
    """Over which the engine's mesh is spread."""
    return len({device.process_index for device in engine.model.mesh.devices.flat})


def ranks_here(engine: Engine) -> list[int]:
    """Model ranks that this process has devices of, whatever their data rank."""
    here = [place for place, device in np.ndenumerate(engine.model.mesh.devices) if is_here(device)]
    return sorted({model_rank for _, model_rank in here})


def ranks_by_process(engine: Engine, data_rank: int) -> dict[int, list[int]]:
    """The model ranks of a data rank, by the process that has their devices."""
    found: dict[int, list[int]] = {}
    for model_rank, device in enumerate(engine.model.mesh.devices[data_rank]):
        found.setdefault(device.process_index, []).append(model_rank)
    return found


def devices_for(engine: Engine, data_rank: int) -> list[jax.Device | None]:
    """The devices of a data rank by `ranks_here`, None where one is another process's."""
    devices = [engine.model.mesh.devices[data_rank, model_rank] for model_rank in ranks_here(engine)]
    return [device if is_here(device) else None for device in devices]


def is_here(device: jax.Device) -> bool:
    return device.process_index == jax.process_index()


def num_planes(engine: Engine) -> int:
    """Planes of a page: two for each layer, the head's included where the engine speculates."""
    return 2 * (engine.model.config.num_hidden_layers + (engine.config.num_speculative_tokens > 0))


def layer_groups(num_layers: int) -> list[tuple[int, int]]:
    """First layer and last + 1 of the groups that prefill runs, and stages the pages of, one after another."""
    bounds = np.linspace(0, num_layers, min(num_layers, _MOST_GROUPS) + 1).astype(int).tolist()
    return list(pairwise(bounds))


def plane_bounds(engine: Engine) -> list[int]:
    """The planes that those groups begin with, the head's layer as the last where there is one, and their number."""
    starts = [2 * start for start, _ in layer_groups(engine.model.config.num_hidden_layers)]
    return sorted({*starts, 2 * engine.model.config.num_hidden_layers, num_planes(engine)})


def copies_of(num_pages: int) -> Iterator[tuple[int, int, int]]:
    """The copies that move so many pages, one at least: first, last + 1, and how many the program takes."""
    for start in range(0, max(num_pages, 1), PAGES_PER_COPY[-1]):
        stop = min(start + PAGES_PER_COPY[-1], num_pages)
        yield start, stop, next(size for size in PAGES_PER_COPY if size >= stop - start)
