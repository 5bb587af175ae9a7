"""Why a few candidates of a step can be known to hold its token: the bound on all other ids, and its proof.

This is Fagin's threshold algorithm (Fagin, Lotem & Naor, Optimal Aggregation Algorithms for Middleware, PODS 2001) on
the sum of two scores. Base logits and noise are known before a walk starts, so each rank keeps, for every request and
step, the ids whose *selection score* s is above τ, the largest selection score that it doesn't keep. All dots of a
previous token p with W2 are below a bound B(p) that depends on the head alone. If the best candidate is strictly above
`limit`, the most that τ and B(p) allow, it is the argmax of the whole vocabulary. If not, the request goes on through
the dense walk.

Order. Scores are compared as `ordered` integers: NaN above all, -0 as +0. An empty remainder has τ = NOTHING, below
all.

B(p) is the largest of the fp32 dots of p, computed by the very dot that scores (same MMA, k ascending), so no other
summation order has to be allowed for. It is +inf where any of them is NaN or 2^80 or more in magnitude. A limit made
of B(p) = inf, or of τ = NaN, is NaN: nothing is above it. Below, both are finite or τ is -inf, and `j` isn't kept: s_j
<= τ.

Greedy, s = base. Let f(b, c) be the logit of base b and dot c: a rounding of c (not with "once"), an fp32 sum, a
rounding to bf16 (not with "none"). Each is monotone on the reals with both infinities, and no NaN can arise: b isn't
NaN, as then s_j would be above τ, and c is finite and stays so. Hence logit_j = f(base_j, dot_j) <= f(τ, B), which is
the limit. It needs no slack. A tie with the limit could be a tie with an unkept smaller id: that is why it takes
strictly more.

Sampled. The key is round(round(v / T) + g), but v is rounded to bf16 *before* the noise g is added, so that s = base /
T + g doesn't order the keys. Let e = 2^-8, bf16's unit roundoff, and f(x) = x + e·|x|; f is increasing, and f(b + c)
<= f(b) + f(c) as |b + c| <= |b| + |c|. The rounding of a sum to fp32 and then bf16 is off by less than e·|b + c|, by e
/ (1 + e) + 2^-24 < e, so
    v_j <= f(base_j + bias_j) <= f(base_j) + f(bias_j) <= f(base_j) + f(B'), with B' the rounded B.
With s_j = f(base_j) / T + g_j then v_j / T + g_j <= s_j + f(B') / T in real numbers: per id, and not by the largest
magnitude of any, which masks of -1e9 would spoil. What fp32 adds: the quotient, both sums and s_j's own roundings are
each off by 2^-24 of a term whose magnitude is at most |s_j| + |g_j| + |f(B') / T|, where |g_j| < 24 unless g_j = -inf,
and then the key is -inf. s + c·|s| increases with s, so τ may stand for s_j. SLACK = 2^-20 of |τ| + |f(B') / T| + 32
covers sixteen such roundings, the limit's own and a reciprocal for the quotient included, and the fp32 sum of rounding
"none", for which e = 0. Denormals are off by 2^-133 / T < 2^-116, below the slack's absolute part. Whoever selects by
approximate noise adds its error. Nothing uses more of s_j than that it is large enough, so it may be rounded up.
Infinities: v / T = inf and g = -inf make a NaN, so ids whose base or f(base) / T is 2^100 or more have s = NaN: they
are kept or make τ NaN. Kernels draw that line at 2^99 T instead of f(base) / T, which is less. Rows with T >= 2^100,
where -inf / T may be NaN, have s = NaN everywhere, or τ = NaN. Elsewhere v / T is below 2^101. s = -inf may be an
overflow of less than -2^127, to which at most 2^98 is added: the limit of τ = -inf is -2^100.

Ranks. Each keeps its own `count` ids; τ is the largest of all ranks'. The union holds the `count` best of all, whoever
has them: in practice the small ids, all on one rank. Ids equal to τ are left out, so that no list overflows.
"""

from __future__ import annotations

import torch

from tp_walk.config import Rounding
from tp_walk.reference import ordered

# Of `ordered`: the τ of a list from which nothing was left out, and that of NaN, above which is nothing.
NOTHING = -(2**40)
TOP = 0x7FFFFFFF

SLACK = 2.0**-20
SLACK_MAGNITUDE = 32.0
BF16_ROUNDOFF = 2.0**-8
LARGEST_DOT = 2.0**80
LARGEST_SCORE = 2.0**100


def from_ordered(value: torch.Tensor) -> torch.Tensor:
    """The float32 that `ordered` maps to these integers; that of NOTHING is NaN."""
    bits = torch.where(value < 0, value ^ 0x7FFFFFFF, value)
    return torch.where(value < -(2**31), 0x7FFFFFFF, bits).to(torch.int32).view(torch.float32)


def swell(value: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """f of the module's text: value + e·|value| in float32, the most that rounding can make of it."""
    if rounding == "none":
        return value
    return value * torch.where(value < 0, 1.0 - BF16_ROUNDOFF, 1.0 + BF16_ROUNDOFF)  # of infinities no NaN


def selection_values(
    base: torch.Tensor, temperatures: torch.Tensor | None, sampled: torch.Tensor, rounding: Rounding
) -> torch.Tensor:
    """What stands in for the logits in the selection score: base for greedy rows, f(base) for sampled ones.

    base: `[batch, ids]`. temperatures: `[batch]`, effective ones, and sampled: `[batch]` bool. Returns float32; NaN
    where no limit would hold.
    """
    base = base.float()
    if temperatures is None:
        return base
    value = swell(base, rounding)
    limitless = (base >= LARGEST_SCORE) | (value / temperatures[:, None] >= LARGEST_SCORE)
    limitless |= (temperatures >= LARGEST_SCORE)[:, None]
    return torch.where(sampled[:, None], torch.where(limitless, torch.nan, value), base)


def keep_best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids to keep, `[batch, ids]` bool, at most `count` a row, and τ, `[batch]` int64 as `ordered`.

    scores: `[batch, ids]` float32 selection scores.
    """
    order = ordered(scores)
    if order.shape[1] <= count:
        return torch.ones_like(order, dtype=torch.bool), order.new_full(order.shape[:1], NOTHING)
    tau = order.kthvalue(order.shape[1] - count, dim=1).values
    return order > tau[:, None], tau


def bias_bound(dots: torch.Tensor) -> torch.Tensor:
    """B of each row of dots, `[batch, ids]` float32 → `[batch]`; -inf of none."""
    if not dots.shape[1]:
        return dots.new_full(dots.shape[:1], -torch.inf)
    bounded = (dots.abs() < LARGEST_DOT).all(dim=1)
    return torch.where(bounded, dots.amax(dim=1), torch.inf)


def limit(
    tau: torch.Tensor,
    bound: torch.Tensor,
    temperatures: torch.Tensor | None,
    sampled: torch.Tensor,
    rounding: Rounding,
    noise_error: float = 0.0,
) -> torch.Tensor:
    """What no score of an id with a selection score of τ or less exceeds, `[batch, …]` int64 as `ordered`.

    tau: `[batch, …]` int64, as `ordered`. bound: `[batch]` float32, B of each row's previous token. temperatures,
    sampled: as in `selection_values`. noise_error: how far the selection's noise may be from the exact one.
    """
    shape = (-1, *[1] * (tau.ndim - 1))
    score = from_ordered(tau)
    bias = bound.view(shape) if rounding == "once" else bound.view(shape).bfloat16().float()
    total = score + bias
    most = total if rounding == "none" else total.bfloat16().float()
    if temperatures is not None:
        share = swell(bias, rounding) / temperatures.view(shape)
        slack = SLACK * (score.abs() + share.abs() + SLACK_MAGNITUDE) + noise_error
        drawn = torch.where(score == -torch.inf, -LARGEST_SCORE, score + share + slack)
        most = torch.where(sampled.view(shape), drawn, most)
    order = torch.where(bound.isinf().view(shape), TOP, ordered(most))
    return torch.where(tau == NOTHING, NOTHING, torch.where(tau == TOP, TOP, order))
