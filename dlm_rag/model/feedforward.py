"""What a layer does to each token after attention: one feed-forward net, or a mixture of experts.

Shapes: T tokens, E experts, k of them for each token, W model width, I width of an expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_rag.model.denoiser_config import DenoiserConfig, ExpertsConfig


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of `x`."""
    return torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)


def get_compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products of `x` are computed: that of autocast where it is on, else its own."""
    return torch.get_autocast_dtype(x.device.type) if is_autocast(x) else x.dtype


class Linear(nn.Linear):
    """Takes its weights from a checkpoint or from `Denoiser.initialise`, not at construction.

    (On the meta device, torch's own initialisation imports its compiler, for 1.5 seconds.)
    """

    def reset_parameters(self) -> None:
        pass


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner, bias=False)
        self.up_proj = Linear(width, inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Which experts a token goes to, and with which weights."""

    def __init__(self, experts: ExpertsConfig, width: int) -> None:
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(experts.num_experts, width))
        self.expert_bias = None
        if experts.expert_bias:  # moved by how busy the experts are, never by gradients
            self.expert_bias = nn.Parameter(torch.empty(experts.num_experts), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, W) -> the weight of each chosen expert, float32, and their numbers; both (T, k)."""
        e = self.experts
        # As in the public code: sigmoids are float32 from the weights on, softmax from their sums on.
        if e.score_function == "sigmoid":
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        else:
            scores = F.linear(x, self.weight).softmax(dim=-1, dtype=torch.float32)
        preferred = scores if self.expert_bias is None else scores + self.expert_bias
        if e.n_group > 1:  # the groups whose two best experts are best together
            grouped = preferred.unflatten(1, (e.n_group, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(e.topk_group, dim=-1).indices
            kept = torch.zeros_like(grouped[..., 0]).scatter(1, best, 1.0).bool()
            preferred = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        chosen = preferred.topk(e.num_experts_per_tok, dim=-1).indices
        counts = scores.gather(1, chosen)
        if e.norm_topk_prob:
            counts = counts / (counts.sum(-1, keepdim=True) + 1e-20)
        return counts * e.routed_scaling_factor, chosen


def grouped_matmul(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows of x (n, in), up to its entry in `ends` (E,), times its weights (E, out, in)."""
    low = get_compute_dtype(weights)  # autocast does this only for other products
    x, weights = x.to(low), weights.to(low)
    if (x.is_cuda and x.dtype != torch.bfloat16) or x.device.type not in ("cpu", "cuda"):
        return _looped_matmul(x, weights, ends)
    return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)


def _looped_matmul(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """As `grouped_matmul`, where torch has no grouped product: the host waits for the counts of tokens."""
    parts = x.tensor_split(ends[:-1].long().cpu())
    return torch.cat([part @ weight.T for part, weight in zip(parts, weights, strict=True)])


class ExpertStack(nn.Module):
    """The weights of all experts of a layer, stacked."""

    matmul_by_expert = staticmethod(grouped_matmul)

    def __init__(self, experts: ExpertsConfig, width: int) -> None:
        super().__init__()
        count, inner = experts.num_experts, experts.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x (n, W), sorted by expert, each expert's tokens up to its entry in `ends` (E,) -> the same."""
        gate, up = self.matmul_by_expert(x, self.gate_up_proj, ends).chunk(2, dim=-1)
        return self.matmul_by_expert(F.silu(gate) * up, self.down_proj, ends)


class MixtureOfExperts(nn.Module):
    def __init__(self, experts: ExpertsConfig, width: int) -> None:
        super().__init__()
        self.gate = Router(experts, width)
        self.experts = ExpertStack(experts, width)
        shared = experts.shared_intermediate_size
        self.shared_experts = FeedForward(width, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """x (T, W) -> the weighted sum of the chosen experts, in float32; the host does not wait."""
        counts, chosen = self.gate(x)
        sent, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(len(self.gate.weight), device=x.device)
        ends = torch.searchsorted(sent, numbers, right=True, out_int32=True)
        made = self.experts(x[order // chosen.shape[1]], ends)
        back = torch.empty_like(made).index_copy(0, order, made).unflatten(0, chosen.shape)
        mixed = (back * counts[..., None]).sum(1).to(x.dtype)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(x)


def build_feed_forward(config: DenoiserConfig, layer: int) -> nn.Module:
    """The feed-forward part of a layer of a denoiser."""
    if layer < config.dense_layers:
        return FeedForward(config.hidden_size, config.intermediate_size)
    assert config.experts is not None
    return MixtureOfExperts(config.experts, config.hidden_size)
