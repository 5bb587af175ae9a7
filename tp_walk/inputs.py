"""A walk's arguments, checked in full on the host before anything reaches the device.

This runs before every launch, so nothing here waits for the device: what lies in CUDA memory (anchors, num_valid) is
checked by the kernel, which clamps and flags. On the CPU it is checked here.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from tp_walk.config import LOGITS_MODES, LOGITS_ROWS, LogitsMode, LogitsRows, Rounding
from tp_walk.errors import WalkInputError
from tp_walk.noise import Noise
from tp_walk.plan import WalkInputs, WalkOutput
from tp_walk.shard import Shard

_ID_DTYPES = (torch.int64, torch.int32)


class InputChecker:
    """Checks arguments against what doesn't change while a runtime lives.

    Args:
        vocab_size: V. target_vocab_size: anchors lie below it. shard: this rank's columns.
        max_batch, max_gamma, rounding, device: the runtime's.
    """

    def __init__(
        self,
        vocab_size: int,
        target_vocab_size: int,
        shard: Shard,
        max_batch: int,
        max_gamma: int,
        rounding: Rounding,
        device: torch.device,
    ) -> None:
        self._vocab_size = vocab_size
        self._target_vocab_size = target_vocab_size
        self._width = shard.width
        self._max_batch = max_batch
        self._max_gamma = max_gamma
        self._device = device
        self._on_host = device.type == "cpu"
        self._base_dtypes = (torch.bfloat16, torch.float32) if rounding == "none" else (torch.bfloat16,)
        self.logits_dtype = torch.float32 if rounding == "none" else torch.bfloat16

    def logits_width(self, logits: LogitsMode) -> int:
        """Columns of the logits of a mode other than "none"."""
        return self._vocab_size if logits == "full" else self._width

    def __call__(
        self,
        base_logits: torch.Tensor,
        anchors: torch.Tensor,
        temperatures: torch.Tensor | None,
        noise: Noise | None,
        logits: LogitsMode,
        logits_rows: LogitsRows,
        num_valid: torch.Tensor | None,
        out: WalkOutput | None,
        lse: bool,
    ) -> WalkInputs:
        """The arguments of WalkRuntime.walk, with output tensors made where `out` brings none.

        Raises:
            WalkInputError: naming the argument, its value and what it must be.
        """
        if logits not in LOGITS_MODES:
            raise WalkInputError(f"logits is {logits!r}; it must be one of {', '.join(LOGITS_MODES)}")
        if logits_rows not in LOGITS_ROWS:
            raise WalkInputError(f"logits_rows is {logits_rows!r}; it must be one of {', '.join(LOGITS_ROWS)}")
        batch, gamma, width = self._base_shape(base_logits)
        if num_valid is not None:
            self._tensor("num_valid", num_valid, ((), (1,)), (torch.int32,))
        self._anchors(anchors, batch, num_valid)
        if temperatures is not None:
            self._tensor("temperatures", temperatures, ((batch,),), (torch.float32,))
            self._noise(noise, batch)
        tokens, logits_out, lse_out = self._outputs(batch, gamma, logits, num_valid, out, lse)
        # Narrower than V, the columns can only be this rank's shard; a whole row may be padded, too.
        base_is_full = width >= self._vocab_size
        return WalkInputs(
            base_logits,
            base_is_full,
            anchors,
            temperatures,
            noise,
            num_valid,
            logits,
            logits_rows,
            tokens,
            logits_out,
            lse_out,
        )

    def _base_shape(self, base: torch.Tensor) -> tuple[int, int, int]:
        if not isinstance(base, torch.Tensor) or base.ndim != 3:
            self._refuse("base_logits", base, "a tensor [batch, gamma, V or this rank's shard width, or more]")
        batch, gamma, width = base.shape
        if batch > self._max_batch:
            raise WalkInputError(f"the batch is {batch}; this runtime was made with max_batch={self._max_batch}")
        if not 1 <= gamma <= self._max_gamma:
            raise WalkInputError(f"gamma is {gamma}; it must be in 1..{self._max_gamma}, this runtime's max_gamma")
        if width < self._width:
            raise WalkInputError(
                f"base_logits has {width} columns; this rank's shard has {self._width}, the vocabulary "
                f"{self._vocab_size}"
            )
        if base.dtype not in self._base_dtypes:
            self._refuse("base_logits", base, f"{_names(self._base_dtypes)} with this runtime's rounding")
        if base.device != self._device:
            self._refuse("base_logits", base, f"on {self._device}")
        if width > 1 and base.stride(2) != 1:
            raise WalkInputError(f"base_logits has strides {base.stride()}; the last must be 1")
        return batch, gamma, width

    def _anchors(self, anchors: torch.Tensor, batch: int, num_valid: torch.Tensor | None) -> None:
        self._tensor("anchors", anchors, ((batch,),), _ID_DTYPES, contiguous=False)
        if not self._on_host:
            return
        valid = batch if num_valid is None else int(num_valid)
        if not 0 <= valid <= batch:
            raise WalkInputError(f"num_valid is {valid}; it must be in 0..{batch}, the batch")
        wrong = anchors[:valid][(anchors[:valid] < 0) | (anchors[:valid] >= self._target_vocab_size)]
        if wrong.numel():
            raise WalkInputError(f"an anchor is {int(wrong[0])}; ids lie in [0, {self._target_vocab_size})")

    def _noise(self, noise: Noise | None, batch: int) -> None:
        if not isinstance(noise, Noise):
            self._refuse("noise", noise, "tp_walk.Noise(key, offset), since temperatures are given")
        for name, value in (("noise.key", noise.key), ("noise.offset", noise.offset)):
            if isinstance(value, torch.Tensor):
                self._tensor(name, value, ((1,), (batch,)), (torch.int64,))
            elif not isinstance(value, int):
                self._refuse(name, value, "an int or an int64 tensor [1] or [batch]")
            elif not -(2**63) <= value < 2**64:
                raise WalkInputError(f"{name} is {value}; it must fit in 64 bits")
        if noise.rows is not None:
            self._tensor("noise.rows", noise.rows, ((batch,),), (torch.int64,))

    def _outputs(
        self,
        batch: int,
        gamma: int,
        logits: LogitsMode,
        num_valid: torch.Tensor | None,
        out: WalkOutput | None,
        lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        tokens = logits_out = lse_out = None
        if out is not None:
            tokens, logits_out, lse_out = out.tokens, out.logits, out.lse
            self._tensor("out.tokens", tokens, ((batch, gamma),), (torch.int64,))
        elif num_valid is None or (not self._on_host and torch.cuda.is_current_stream_capturing()):
            tokens = torch.empty(batch, gamma, dtype=torch.int64, device=self._device)
        else:
            # Rows that the walk leaves alone still hold ids. (In a captured graph the fill would be another node.)
            tokens = torch.zeros(batch, gamma, dtype=torch.int64, device=self._device)
        if logits == "none":
            if logits_out is not None:
                self._refuse("out.logits", logits_out, 'None with logits="none"')
        else:
            shape = (batch, gamma, self.logits_width(logits))
            if logits_out is None:
                logits_out = torch.empty(shape, dtype=self.logits_dtype, device=self._device)
            else:
                self._tensor("out.logits", logits_out, (shape,), (self.logits_dtype,))
        if not lse:
            if lse_out is not None:
                self._refuse("out.lse", lse_out, "None without lse=True")
        elif lse_out is None:
            lse_out = torch.empty(batch, gamma, dtype=torch.float32, device=self._device)
        else:
            self._tensor("out.lse", lse_out, ((batch, gamma),), (torch.float32,))
        return tokens, logits_out, lse_out

    def _tensor(
        self,
        name: str,
        value: torch.Tensor,
        shapes: tuple[tuple[int, ...], ...],
        dtypes: tuple[torch.dtype, ...],
        contiguous: bool = True,
    ) -> None:
        fits = (
            isinstance(value, torch.Tensor)
            and value.shape in shapes
            and value.dtype in dtypes
            and value.device == self._device
            and (not contiguous or value.is_contiguous())
        )
        if not fits:
            one_of = " or ".join(str(list(shape)) for shape in shapes)
            layout = "contiguous " if contiguous else ""
            self._refuse(name, value, f"a {layout}tensor {one_of} {_names(dtypes)} on {self._device}")

    def _refuse(self, name: str, value: object, expected: str) -> NoReturn:
        raise WalkInputError(f"{name} is {_describe(value)}; it must be {expected}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    dtype = str(value.dtype).removeprefix("torch.")
    strides = "" if value.is_contiguous() else f" with strides {value.stride()}"
    return f"a tensor {list(value.shape)} {dtype} on {value.device}{strides}"
