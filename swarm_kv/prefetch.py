"""Starting a layer's reads before its query is known.

A hook in layer L - 1 predicts L's query (`swarm_kv.predictors`), lets the selector choose by it and
submits the reads. When the true query comes, it selects anew, and only what was missed is read
late: what is attended does not depend on the prediction.

In models where only some layers attend to everything, those are read ahead from the layer just
before them, whatever its kind.
"""

from __future__ import annotations

import collections
import inspect
import itertools
import logging
import math
import statistics
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import compat, predictors
from .cache import full_attention_layers
from .config import SwarmConfig
from .errors import CapacityError, StorageError
from .layer import SwarmLayer
from .predictors import Hint, Offloaded, Predictor, Projection
from .step import Ahead, Cost
from .untraced import untraced

logger = logging.getLogger(__name__)

USUAL = 1.1
"""Share of a step's budget that is read ahead: a tenth more misses half as much."""
SHARES = (0.0, USUAL, 1.25)
"""What a controller chooses from."""
FIRST_PERIOD, LONGEST_PERIOD = 8, 128
TRIAL = 3
"""Steps between two trials, and steps of a trial."""
MARGIN = 0.95
"""Reading more ahead must cost at most this share of what reading less does."""


class Controller:
    """Keeps one layer at the share that costs least time, by trying the others now and then.

    Predicting alone may cost as much as all that reading ahead could save. Then only every
    `LONGEST_PERIOD` steps are others tried.
    """

    def __init__(self) -> None:
        self._seconds = {share: collections.deque[float](maxlen=5) for share in SHARES}
        self._predicting = collections.deque[float](maxlen=5)
        self._share = USUAL
        self._others = itertools.cycle(SHARES)
        self._tried: float | None = None
        self._period, self._left = FIRST_PERIOD, TRIAL

    def add(self, cost: Cost) -> None:
        """Take what a step cost into account."""
        self._seconds[cost.share].append(cost.seconds)
        if cost.share > 0:
            self._predicting.append(cost.predicting)

    def next(self) -> float:
        """Share of its budget that the next step is to read ahead."""
        if self._left == 0:
            if self._tried is None and self._hopeless() and self._period < LONGEST_PERIOD:
                self._period = min(2 * self._period, LONGEST_PERIOD)
                self._left = self._period
            elif self._tried is None:
                self._tried = next(share for share in self._others if share != self._share)
                self._left = TRIAL
            else:
                self._choose(*sorted((self._share, self._tried)))
                self._tried = None
                self._left = self._period
        self._left -= 1
        return self._share if self._tried is None else self._tried

    def _hopeless(self) -> bool:
        """Whether nothing is read ahead, and predicting would cost more than all reads do."""
        low = self._seconds[0.0]
        if self._share > 0 or not low or not self._predicting:
            return False
        return statistics.median(self._predicting) >= MARGIN * statistics.median(low)

    def _choose(self, less: float, more: float) -> None:
        low, high = self._seconds[less], self._seconds[more]
        saves = not low or statistics.median(high or (math.inf,)) < MARGIN * statistics.median(low)
        share = more if saves else less
        unchanged = share == self._share
        self._period = min(2 * self._period, LONGEST_PERIOD) if unchanged else FIRST_PERIOD
        self._share = share


class Prefetcher:
    """Hooks in a model's decoder layers that read ahead for the `SwarmCache`s of its calls.

    Args:
        model: a supported model.
        config: `prefetch` and `predictor`.

    Raises:
        ArgumentError: unknown predictor.
    """

    def __init__(self, model: Any, config: SwarmConfig) -> None:
        self._predict = predictors.resolve(config.predictor)
        self._config = config
        self._undo: list[Callable[[], Any]] = []
        self._started = Started()
        self._noted = False
        if config.prefetch == "off":
            return
        try:
            decoder = model.get_decoder()
            for number in full_attention_layers(model.config):
                self._install(decoder, number)
        except AttributeError as error:
            self.remove()
            logger.warning(
                "swarm_kv: nothing is prefetched: how `%s` makes its queries is not known (%s)",
                type(model).__name__,
                error,
            )

    def _install(self, decoder: Any, number: int) -> None:
        reader = Reader(
            number,
            Projection(decoder.layers[number]),
            Rope(decoder, number),
            self._predict,
            Controller() if self._config.prefetch == "auto" else None,
            self._started,
            self._note_offloaded,
            first=not self._undo,
        )
        early = self._config.prefetch == "decoder_input"
        self._undo += [hook.remove for hook in hooked(decoder, number, early, reader.read)]

    def _note_offloaded(self, number: int) -> None:
        """Say, once, that a layer whose weights are elsewhere is left out."""
        if not self._noted:
            self._noted = True
            logger.warning(
                "swarm_kv: layer %d and others like it are not prefetched: their weights are moved "
                "into memory for their own calls only",
                number,
            )

    def remove(self) -> None:
        """Take the hooks away, and end reads that no step came for."""
        while self._undo:
            self._undo.pop()()
        self._started.release_all()


def source_of(number: int) -> int:
    """The layer in which layer `number` is predicted: the one before; layer 0 in itself."""
    return max(number - 1, 0)


def hooked(
    decoder: Any, number: int, early: bool, call: Callable[[torch.Tensor, dict[str, Any]], None]
) -> list[Any]:
    """Let `call(hidden, kwargs)` be called at the point where layer `number` is predicted.

    Args:
        decoder: module with the layers.
        number: position of the layer.
        early: at the input of the layer before, rather than behind its attention.
        call: takes the residual stream [batch, n, features] there, and the arguments of the layer
            before.

    Returns:
        Handles of the hooks.
    """
    before = decoder.layers[source_of(number)]
    norm = None if early or number == 0 else _norm_after_attention(before)
    under_way = threading.local()

    @untraced
    def at_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call(args[0] if args else kwargs["hidden_states"], kwargs)

    @untraced
    def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        under_way.kwargs = kwargs

    @untraced
    def after_attention(module: Any, args: tuple[Any, ...]) -> None:
        kwargs = under_way.__dict__.pop("kwargs", None)
        if kwargs is not None and args:
            call(args[0], kwargs)

    if norm is None:
        return [before.register_forward_pre_hook(at_input, with_kwargs=True)]
    return [
        before.register_forward_pre_hook(enter, with_kwargs=True),
        norm.register_forward_pre_hook(after_attention),
    ]


def _norm_after_attention(layer: Any) -> Any:
    """The module whose input is the residual stream behind attention, or None."""
    for name in ("pre_feedforward_layernorm", "post_attention_layernorm"):
        if hasattr(layer, name):
            return getattr(layer, name)
    return None


class Rope:
    """Rotary embeddings of one layer, from what the layer before it is called with.

    Args:
        decoder: module with the layers and `rotary_emb`.
        number: position of the layer that is meant.
    """

    def __init__(self, decoder: Any, number: int) -> None:
        self._rotary, self._layer_type = None, None
        if "layer_type" in inspect.signature(decoder.rotary_emb.forward).parameters:
            types = decoder.config.layer_types
            if types[source_of(number)] != types[number]:
                self._rotary, self._layer_type = decoder.rotary_emb, types[number]

    def __call__(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """Cosines and sines for the tokens of `hidden`."""
        if self._rotary is None:
            return kwargs["position_embeddings"]
        return self._rotary(hidden, kwargs["position_ids"], self._layer_type)


class Started:
    """Reads that were started ahead and perhaps not taken over by a step yet.

    A call that ends by an exception leaves some behind: they end with the thread's next call, with
    the cache, or here.
    """

    def __init__(self) -> None:
        self._all = weakref.WeakSet[Ahead]()
        self._of_thread = threading.local()

    def begin_call(self) -> None:
        """End what an earlier call of this thread left behind."""
        for ahead in self._of_thread.__dict__.pop("started", ()):
            ahead.release()

    def add(self, ahead: Ahead) -> None:
        """Remember reads that were started."""
        self._all.add(ahead)
        if not hasattr(self._of_thread, "started"):
            self._of_thread.started = weakref.WeakSet[Ahead]()
        self._of_thread.started.add(ahead)

    def release_all(self) -> None:
        """End them all."""
        for ahead in list(self._all):
            ahead.release()


class Reader:
    """Reads ahead for one layer, called from the layer before it, see `hooked`.

    Args:
        number: position of the layer.
        project: of the layer.
        rope: of the layer.
        predict: strategy.
        controller: says how much; None for `USUAL`, always.
        started: takes note of what was started.
        note_offloaded: is told the layer where its weights are not in memory.
        first: whether this is the first of the layers that are read ahead for.
    """

    def __init__(
        self,
        number: int,
        project: Projection,
        rope: Rope,
        predict: Predictor,
        controller: Controller | None,
        started: Started,
        note_offloaded: Callable[[int], None],
        first: bool,
    ) -> None:
        self._number = number
        self._project = project
        self._rope = rope
        self._predict = predict
        self._controller = controller
        self._started = started
        self._note_offloaded = note_offloaded
        self._first = first
        self._failed = False

    @torch.no_grad()
    def read(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Predict, select and submit, where a decoding step of a `SwarmCache` is under way.

        Args:
            hidden: [batch, n, features], the residual stream in the layer before.
            kwargs: arguments of that layer.
        """
        if self._first:
            self._started.begin_call()
        layers = getattr(compat.cache_keyword(kwargs), "layers", ())
        layer = layers[self._number] if self._number < len(layers) else None
        if self._failed or not isinstance(layer, SwarmLayer) or not layer.expects(hidden.shape):
            return
        share = self._share(layer)
        if share == 0:
            return
        began = time.perf_counter()
        try:
            query = self._predict(
                Hint(
                    self._number,
                    hidden,
                    layer.previous_query,
                    lambda stream: self._project(stream, self._rope(stream, kwargs)),
                )
            )
            self._started.add(layer.read_ahead(query, share, began))
        except (CapacityError, StorageError):
            pass  # of no consequence, or the step itself will meet and report it
        except Offloaded:
            self._note_offloaded(self._number)
        except Exception as error:
            self._failed = True
            logger.warning(
                "swarm_kv: layer %d is not prefetched any more: %s: %s",
                self._number,
                type(error).__name__,
                error,
            )

    def _share(self, layer: SwarmLayer) -> float:
        if self._controller is None:
            return USUAL
        cost, layer.cost = layer.cost, None
        if cost is not None:
            self._controller.add(cost)
        return self._controller.next()
