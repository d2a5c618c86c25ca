"""Pools: the tensors that rows of one size class live in."""

from contextlib import ExitStack, suppress

import torch

from scissorhands.budget import Grant, ModelShape
from scissorhands.codec import RowCodec, Statistics, get_codec
from scissorhands.formats import EXACT
from scissorhands.kernels.cpu_launch import Call, calls_of
from scissorhands.layer_pool import LayerCodec, LayerPool
from scissorhands.signals import signals_for
from scissorhands.sliding import SlidingLayer


class Pool:
    """All layers' slots of the rows of one size class: equal budgets and equal evidence.

    Rows with budgets by head are held as if every KV head were a layer: nothing is padded to the largest budget.

    A pool holds exactly the rows that are in use, so that what is allocated is what was granted.

    Args:
        grant: The grant that the rows share in budgets and signals.
        shape: The model's sizes.
        dtype: Number type of keys and values.
        device: Where the tensors live.
        statistics: What was measured of the model, for codecs that need it.
    """

    def __init__(
        self,
        grant: Grant,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        statistics: Statistics | None = None,
    ) -> None:
        signals = signals_for(grant, shape.group)
        self.rows = 0
        # Measured when it has changed: a worker asks after every step.
        self._allocated: int | None = None
        # By layer of the model; they go with the memory that they point at.
        self._cpu_calls: dict[int, list[Call]] = {}
        self._parts = shape.kv_heads if grant.by_head else 1
        shape = grant.shape_of(shape)
        self.kv_heads = shape.kv_heads
        self.global_layers = shape.global_layers
        self.layers = [
            SlidingLayer(0, shape.kv_heads, slots, shape.head_dim, shape.window(layer), dtype, device)
            if shape.window(layer)
            else LayerPool(
                0,
                shape.kv_heads,
                slots,
                shape.head_dim,
                signals,
                dtype,
                device,
                layer_codec(grant.codec_of(layer), shape, layer, statistics),
            )
            for layer, slots in enumerate(grant.layer_slots)
        ]

    def parts(self, layer: int) -> range:
        """Return which of ``layers`` hold a layer of the model: one, or one for each of its KV heads."""
        return range(layer * self._parts, (layer + 1) * self._parts)

    def cpu_calls(self, layer: int) -> list[Call]:
        """Return how the processor's kernel goes over a layer of the model, for one new token a row; else none."""
        if layer not in self._cpu_calls:
            self._cpu_calls[layer] = calls_of(self.layers, self.parts(layer))
        return self._cpu_calls[layer]

    @property
    def model_layers(self) -> int:
        """Layers of the model."""
        return len(self.layers) // self._parts

    def add_row(self) -> int:
        """Add an empty row and return its index. If memory runs out halfway, all layers stay as they were."""
        self._forget()
        with ExitStack() as undo:
            for layer in self.layers:
                layer.add_row()
                undo.callback(layer.hide_last_row)
            undo.pop_all()
        self.rows += 1
        return self.rows - 1

    def remove_row(self, row: int) -> None:
        """Remove a row; the last row takes its index. If memory runs out, the row is removed all the same."""
        self._forget()
        for layer in self.layers:
            layer.move_last_row(into=row)
        for layer in self.layers:
            layer.hide_last_row()
        self.rows -= 1
        # Torch's out-of-memory errors. What is not given back now is given back with the next row that goes.
        with suppress(RuntimeError):
            for layer in self.layers:
                layer.release_hidden()

    def allocated_bytes(self) -> int:
        """Return the bytes of all tensors, measured on their storages."""
        if self._allocated is None:
            storages = [tensor.untyped_storage() for layer in self.layers for tensor in layer.tensors()]
            self._allocated = sum(storage.nbytes() for storage in storages)
        return self._allocated

    def packed_bytes(self) -> int:
        """Return the bytes of packed keys and values, measured on their storages."""
        packed = [layer for layer in self.layers if isinstance(layer, LayerPool) and layer.codec is not None]
        return sum(tensor.untyped_storage().nbytes() for layer in packed for tensor in (layer.keys, layer.values))

    def _forget(self) -> None:
        """Forget what was found out about the memory, which is about to change."""
        self._cpu_calls.clear()
        self._allocated = None


def layer_codec(name: str, shape: ModelShape, layer: int, statistics: Statistics | None) -> LayerCodec | None:
    """Return what packs a global layer's slots; None if they are resident as they are.

    Args:
        name: Name of the format.
        shape: The shape in which rows are stored.
        layer: The layer, of that shape.
        statistics: What was measured of the model, for codecs that need it.

    Raises:
        InvalidRequestError: The format cannot be resident, or needs statistics that there are not.
    """
    if name == EXACT:
        return None
    first = shape.global_layers.index(layer) * shape.kv_heads
    codec = get_codec(name, shape.head_dim, statistics, slice(first, first + shape.kv_heads))
    assert isinstance(codec.keys, RowCodec)
    assert isinstance(codec.values, RowCodec)
    return LayerCodec(codec.keys, codec.values)
