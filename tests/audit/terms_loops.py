"""Programs whose losses are made of what cannot train as it is meant, or has a wrong sign; and their neighbours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.nn import functional as fn

from tests.audit.case import adam
from tests.audit.loops import Loop, taken

BATCH = 32
WIDE = 12
Made = Callable[[nn.Module, Tensor], Tensor]


def program(name: str, loss: Made, width: int = 6) -> Callable[[int, int], None]:
    """Two steps of a small network with what this makes of it and a batch."""

    def run(rank: int, world: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDE, 16), nn.Tanh(), nn.Linear(16, width))
        optimizer = adam(model)
        for _ in range(2):
            taken(model, optimizer, loss(model, torch.randn(BATCH, WIDE)))

    run.__name__ = name
    return run


# --- divergences between distributions ---


def logits_of_a_teacher(x: Tensor, width: int = 6) -> Tensor:
    return x[:, :width].contiguous() * 2


def divided_behind_the_softmax(model: nn.Module, x: Tensor) -> Tensor:
    student, teacher = model(x), logits_of_a_teacher(x)
    return fn.kl_div((student / 4).log_softmax(1), teacher.softmax(1) / 4, reduction="batchmean") * 16


def divided_before_the_softmax(model: nn.Module, x: Tensor) -> Tensor:
    student, teacher = model(x), logits_of_a_teacher(x)
    return fn.kl_div((student / 4).log_softmax(1), (teacher / 4).softmax(1), reduction="batchmean") * 16


def masked_rows(model: nn.Module, x: Tensor) -> Tensor:
    kept = (torch.arange(BATCH) % 3 > 0).float()[:, None]
    return fn.kl_div(model(x).log_softmax(1), logits_of_a_teacher(x).softmax(1) * kept, reduction="batchmean")


def rows_that_are_weighed(model: nn.Module, x: Tensor) -> Tensor:
    weights = torch.linspace(0.1, 1, BATCH)[:, None]
    return fn.kl_div(model(x).log_softmax(1), logits_of_a_teacher(x).softmax(1) * weights, reduction="batchmean")


def of_each_bit(model: nn.Module, x: Tensor) -> Tensor:
    logits, share = model(x)[:, :1], torch.full((BATCH, 1), 0.3)
    one = fn.kl_div(fn.logsigmoid(logits), share, reduction="batchmean")
    return one + fn.kl_div(fn.logsigmoid(-logits), 1 - share, reduction="batchmean")


def of_pairs(model: nn.Module, x: Tensor) -> Tensor:
    logits, share = model(x)[:, :1], torch.full((BATCH, 1), 0.3)
    logs = torch.cat([fn.logsigmoid(logits), fn.logsigmoid(-logits)], 1)
    return fn.kl_div(logs, torch.cat([share, 1 - share], 1), reduction="batchmean")


def of_a_mixture(model: nn.Module, x: Tensor) -> Tensor:
    logs, teachers = model(x).log_softmax(1), [logits_of_a_teacher(x * one).softmax(1) / 2 for one in (1, -1)]
    return sum((fn.kl_div(logs, one, reduction="batchmean") for one in teachers), torch.zeros(()))


def of_maps(model: nn.Module, x: Tensor) -> Tensor:
    """Each sample a map that sums to 1 as a whole."""
    logs = model(x).log_softmax(1).view(BATCH, 2, 3)
    return fn.kl_div(logs, logits_of_a_teacher(x).softmax(1).view(BATCH, 2, 3), reduction="batchmean")


# --- samples compared with samples ---


def views_compared(model: nn.Module, x: Tensor, *, masked: bool) -> Tensor:
    both = fn.normalize(torch.cat([model(x), model(x + 0.1)]), dim=1)
    similar = both @ both.t() / 0.2
    if masked:
        similar = similar.masked_fill(torch.eye(len(both), dtype=torch.bool), float("-inf"))
    return fn.cross_entropy(similar, torch.cat([torch.arange(BATCH) + BATCH, torch.arange(BATCH)]))


def compared_with_itself(model: nn.Module, x: Tensor) -> Tensor:
    return views_compared(model, x, masked=False)


def compared_with_others(model: nn.Module, x: Tensor) -> Tensor:
    return views_compared(model, x, masked=True)


def masked_by_a_large_number(model: nn.Module, x: Tensor) -> Tensor:
    both = fn.normalize(torch.cat([model(x), model(x + 0.1)]), dim=1)
    similar = both @ both.t() / 0.2 - torch.eye(len(both)) * 1e9
    return fn.cross_entropy(similar, torch.cat([torch.arange(BATCH) + BATCH, torch.arange(BATCH)]))


def compared_with_the_other_view(model: nn.Module, x: Tensor) -> Tensor:
    similar = fn.normalize(model(x), dim=1) @ fn.normalize(model(x + 0.1), dim=1).t() / 0.2
    return fn.cross_entropy(similar, torch.arange(BATCH))


def as_many_classes_as_samples(model: nn.Module, x: Tensor) -> Tensor:
    return fn.cross_entropy(model(x).repeat(1, 6)[:, :BATCH], (torch.arange(BATCH) + 1) % BATCH)


def slopes_of_each(model: nn.Module, x: Tensor) -> Tensor:
    """Gradients of each sample, as private training clips them."""

    def one(params: dict[str, Tensor], sample: Tensor) -> Tensor:
        return fn.cross_entropy(torch.func.functional_call(model, params, (sample[None],)), torch.zeros(1).long())

    params = {name: param.detach() for name, param in model.named_parameters()}
    slopes = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(params, x)
    assert len(slopes) == len(params)
    return fn.cross_entropy(model(x), torch.arange(BATCH) % 6)


# --- what is drawn, and what a policy is told of it ---


def drawn_by(name: str, code: Callable[[Normal], Tensor]) -> Loop:
    """An autoencoder that draws its code by this."""

    def run(rank: int, world: int) -> None:
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(WIDE, 8), nn.Linear(4, WIDE)])
        optimizer = adam(layers)
        for _ in range(2):
            x = torch.randn(BATCH, WIDE)
            mean, spread = layers[0](x).chunk(2, 1)
            code_of = Normal(mean, (0.5 * spread).exp())
            far = kl_divergence(code_of, Normal(0.0, 1.0)).sum(1).mean()
            taken(layers, optimizer, fn.mse_loss(layers[1](code(code_of)), x) + 0.1 * far)

    run.__name__ = name
    return Loop(run)


def drawn_independently(code_of: Normal) -> Tensor:
    drawn: Tensor = Independent(code_of, 1).sample()
    return drawn


def drawn_and_scored(code_of: Normal) -> Tensor:
    drawn = code_of.sample()
    return drawn + 0 * code_of.log_prob(drawn)


def actor_and_critic(name: str, adv: Callable[[Tensor, Tensor], Tensor], *, by_hand: bool = False) -> Loop:
    """A policy that learns by the advantage that this makes of returns and values."""

    def run(rank: int, world: int) -> None:
        torch.manual_seed(0)
        actor, critic = nn.Linear(WIDE, 3), nn.Linear(WIDE, 1)
        both = nn.ModuleList([actor, critic])
        optimizer = adam(both)
        for _ in range(2):
            x = torch.randn(BATCH, WIDE)
            policy, value = Categorical(logits=actor(x)), critic(x).squeeze(1)
            act = policy.sample()
            returns = (act == x[:, :3].argmax(1)).float() + 0.1 * x[:, 3]
            said = policy.log_prob(act)
            said = actor(x).log_softmax(1).gather(1, act[:, None]).squeeze(1) if by_hand else said
            loss = -(said * adv(returns, value)).mean() - 0.01 * policy.entropy().mean()
            taken(both, optimizer, loss + 0.5 * fn.mse_loss(value, returns))

    run.__name__ = name
    return Loop(run)


def normalised(adv: Tensor) -> Tensor:
    return (adv - adv.mean()) / (adv.std() + 1e-6)


def advantages_of_an_episode(rank: int, world: int) -> None:
    torch.manual_seed(0)
    actor, critic = nn.Linear(WIDE, 3), nn.Linear(WIDE, 1)
    both = nn.ModuleList([actor, critic])
    optimizer, said, seen = adam(both), [], []
    for _ in range(BATCH):
        seen.append(torch.randn(WIDE))
        policy = Categorical(logits=actor(seen[-1]))
        said.append(policy.log_prob(policy.sample()))
    returns, value = torch.randn(BATCH), critic(torch.stack(seen)).squeeze(1)
    adv = returns - value
    loss = -(torch.stack(said) * adv.detach()).mean() + 0.5 * (returns - value).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


DRAWN: tuple[Loop, ...] = tuple(
    Loop(one.run, rule="run.drawn-without-graph")
    for one in (
        drawn_by("code_drawn_by_sample", lambda code_of: code_of.sample()),
        drawn_by("code_drawn_at_once", drawn_independently),
    )
)
LED: tuple[Loop, ...] = tuple(
    Loop(one.run, rule="run.target-trains")
    for one in (
        actor_and_critic("advantage_with_a_graph", lambda returns, value: returns - value),
        actor_and_critic("advantage_with_a_graph_by_hand", lambda returns, value: returns - value, by_hand=True),
        actor_and_critic("advantage_normalised", lambda returns, value: normalised(returns - value)),
    )
)
RIGHT_POLICIES: tuple[Loop, ...] = (
    drawn_by("code_drawn_by_rsample", lambda code_of: code_of.rsample()),
    drawn_by("code_drawn_and_scored", drawn_and_scored),
    Loop(advantages_of_an_episode),
    drawn_by("code_that_is_a_mean", lambda code_of: code_of.mean),
    actor_and_critic("advantage_detached", lambda returns, value: (returns - value).detach()),
    actor_and_critic("advantage_of_a_detached_value", lambda returns, value: normalised(returns - value.detach())),
    actor_and_critic("advantage_that_is_a_gate", lambda returns, value: 1 - value.sigmoid()),
    actor_and_critic("advantage_without_a_critic", lambda returns, value: returns - returns.mean()),
)


# --- targets made of a model's own outputs ---


def learned_from_later(model: nn.Module, x: Tensor, *, detached: bool) -> tuple[Tensor, Tensor]:
    """What is predicted, and the target of it: a reward and what the model says of the next state."""
    reward, ends = x[:, 0] * 0.3, (x[:, 1] > 1).float()
    output = model(x).gather(1, torch.zeros(BATCH, 1).long()).squeeze(1)
    later = model(x.roll(1, 0)).max(1).values
    return output, reward + 0.9 * (1 - ends) * (later.detach() if detached else later)


def trained_target(model: nn.Module, x: Tensor) -> Tensor:
    return fn.smooth_l1_loss(*learned_from_later(model, x, detached=False))


def trained_target_by_hand(model: nn.Module, x: Tensor) -> Tensor:
    output, target = learned_from_later(model, x, detached=False)
    return (output - target).pow(2).mean() * 0.5


def trained_target_of_a_critic(model: nn.Module, x: Tensor) -> Tensor:
    values = model(x)
    advantage = x[:, :1] + 0.99 * model(x.roll(1, 0))[:, :1] - values[:, :1]
    return -(advantage.detach() * values[:, 1:].log_softmax(1)[:, :1]).mean() + 0.5 * advantage.pow(2).mean()


def resting_target(model: nn.Module, x: Tensor) -> Tensor:
    return fn.smooth_l1_loss(*learned_from_later(model, x, detached=True))


def two_views_alike(model: nn.Module, x: Tensor) -> Tensor:
    return fn.mse_loss(model(x), model(x + 0.1))


def two_views_in_other_units(model: nn.Module, x: Tensor) -> Tensor:
    mean, deviation = torch.full((1,), 0.4), torch.full((1,), 2.0)
    one, other = (model(each)[:, 0] * deviation + mean for each in (x, x + 0.1))
    return fn.mse_loss(one, other) + fn.mse_loss(one, x[:, 0])


def residual_of_data(model: nn.Module, x: Tensor) -> Tensor:
    return fn.mse_loss(x[:, :6] + 0.1 * model(x), x[:, 6:])


def two_steps_as_one(model: nn.Module, x: Tensor) -> Tensor:
    """Half steps of a flow against a whole one."""
    middle = x[:, :6] + 0.5 * model(x)
    return fn.mse_loss(model(x), middle - x[:, :6]) + fn.mse_loss(x[:, :6] + model(x), middle + 0.5 * model(x))


def code_of_a_code(model: nn.Module, x: Tensor) -> Tensor:
    code = model(x)
    return fn.mse_loss(model(torch.cat([code, code], 1)), code)


def equation(model: nn.Module, x: Tensor) -> Tensor:
    """What it says of a place, against a source and a part of its slope there."""
    places = x.clone().requires_grad_()
    said = model(places)[:, 0]
    (slope,) = torch.autograd.grad(said.sum(), places, create_graph=True)
    return fn.mse_loss(said, x[:, 0] + 0.5 * slope[:, 0])


def inner_step(model: nn.Module, x: Tensor) -> Tensor:
    params = dict(model.named_parameters())
    inner = fn.mse_loss(torch.func.functional_call(model, params, (x,))[:, 0], x[:, 0])
    slopes = torch.autograd.grad(inner, [*params.values()], create_graph=True)
    moved = {name: one - 0.1 * slope for (name, one), slope in zip(params.items(), slopes, strict=True)}
    return fn.mse_loss(torch.func.functional_call(model, moved, (x,))[:, 0], x[:, 0])


# --- terms that cancel ---


def ratio_of(model: nn.Module, x: Tensor, *, detached: bool) -> Tensor:
    chosen, worth = torch.zeros(BATCH, 1).long(), x[:, :1]
    policy = torch.distributions.Categorical(logits=model(x)[:, :5])
    logs, before = policy.log_prob(chosen[:, 0]), policy.log_prob(chosen[:, 0])
    ratio = (logs - (before.detach() if detached else before)).exp()[:, None]
    gain = torch.min(ratio * worth, ratio.clamp(0.8, 1.2) * worth).mean()
    return -gain + 0.5 * fn.mse_loss(model(x)[:, 5], x[:, 1]) - 0.01 * policy.entropy().mean()


def ratio_to_itself(model: nn.Module, x: Tensor) -> Tensor:
    return ratio_of(model, x, detached=False)


def ratio_to_itself_again(model: nn.Module, x: Tensor) -> Tensor:
    """Computed twice."""
    one, other = (model(x).log_softmax(1)[:, 0] for _ in range(2))
    return -((one.exp() / other.exp()) * x[:, 0]).mean() + model(x).pow(2).mean()


def ratio_to_what_was(model: nn.Module, x: Tensor) -> Tensor:
    return ratio_of(model, x, detached=True)


def preferred(model: nn.Module, x: Tensor) -> Tensor:
    return -fn.logsigmoid(model(x)[:, 0] - model(x + 1)[:, 0]).mean() + model(x).pow(2).mean()


def satisfied(model: nn.Module, x: Tensor) -> Tensor:
    """A margin that is kept everywhere."""
    return (model(x)[:, 0] - model(x + 1)[:, 0] - 99).relu().mean() + model(x).pow(2).mean()


def weighed_by_nothing(model: nn.Module, x: Tensor) -> Tensor:
    return 0.0 * (model(x)[:, 0] - model(x + 1)[:, 0]).mean() + model(x).pow(2).mean()


def from_a_prior(model: nn.Module, x: Tensor) -> Tensor:
    """A posterior that begins as its prior, where the gradient is zero."""
    with torch.no_grad():
        for param in [*model.parameters()][2:]:
            param.zero_()
    mean, log = model(x).chunk(2, 1)
    return -0.5 * (1 + log - mean.pow(2) - log.exp()).sum(1).mean() + (mean - x[:, :3]).pow(2).mean()


def both_ways(model: nn.Module, x: Tensor) -> Tensor:
    """Two passes that drop other inputs."""
    one, other = (model(fn.dropout(x, 0.1)).log_softmax(1) for _ in range(2))
    return fn.kl_div(one, other, log_target=True, reduction="batchmean") + fn.cross_entropy(
        one, torch.arange(BATCH) % 6
    )


def hooked(model: nn.Module, x: Tensor) -> Tensor:
    outputs = model(x)
    heard: list[Tensor] = []
    outputs.register_hook(lambda slope: [heard.append(slope), None][1] if not heard else 1 / 0)
    one, other = (outputs.log_softmax(1)[:, 0] for _ in range(2))
    return (one - other).exp().mean() + outputs.pow(2).mean()


# --- choices among what is masked ---


def hardest(nearest: Callable[[Tensor, Tensor], Tensor]) -> Made:
    """A triplet loss of the hardest samples, of which the furthest of a class are masked rightly."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        found = fn.normalize(model(x), dim=1)
        classes = torch.arange(BATCH) % 4
        distances, same = torch.cdist(found, found), classes[:, None] == classes
        return fn.relu((distances * same).max(1).values - nearest(distances, same) + 0.3).mean()

    return loss


def nearest_of_products(model: nn.Module, x: Tensor) -> Tensor:
    return hardest(lambda far, same: (far * ~same).min(1).values)(model, x)


def nearest_of_filled(model: nn.Module, x: Tensor) -> Tensor:
    return hardest(lambda far, same: far.masked_fill(same, 0).min(1, keepdim=True).values.squeeze(1))(model, x)


def nearest_of_others(model: nn.Module, x: Tensor) -> Tensor:
    return hardest(lambda far, same: far.masked_fill(same, float("inf")).min(1).values)(model, x)


def nearest_past_a_large_number(model: nn.Module, x: Tensor) -> Tensor:
    return hardest(lambda far, same: (far + 1e4 * same).min(1).values)(model, x)


def through(code: Tensor, book: Tensor, estimate: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """What is computed of the nearest of some vectors in the place of each code."""
    nearest = book[torch.cdist(code, book).argmin(1)]
    kept = (code - nearest.detach()).square().mean() + (nearest - code.detach()).square().mean()
    return (estimate(code, nearest)[:, :3] - 1).square().mean() + kept


def quantized(model: nn.Module, x: Tensor) -> Tensor:
    code = model(x)
    return through(code[2:], code[:2].tanh(), lambda code, nearest: code + (nearest - code))


def quantized_the_other_way(model: nn.Module, x: Tensor) -> Tensor:
    code = model(x)
    return through(code[2:], code[:2].tanh(), lambda code, nearest: (nearest - code) + code)


def quantized_remainder(model: nn.Module, x: Tensor) -> Tensor:
    said = model(x)
    return through(said[2:] - said[1:2], said[:2].tanh(), lambda code, nearest: (nearest - code) + code)


def straight_through(model: nn.Module, x: Tensor) -> Tensor:
    code = model(x)
    return through(code[2:], code[:2].tanh(), lambda code, nearest: code + (nearest - code).detach())


def rounded_on_the_way(model: nn.Module, x: Tensor) -> Tensor:
    said = (8 * model(x).clamp(-1, 1)).round() / 8
    return (said - x[:, : said.shape[1]]).square().mean()


def rounded_straight_through(model: nn.Module, x: Tensor) -> Tensor:
    said = 8 * model(x).clamp(-1, 1)
    said = (said + (said.round() - said).detach()) / 8
    return (said - x[:, : said.shape[1]]).square().mean()


def rounded_beside(model: nn.Module, x: Tensor) -> Tensor:
    """A part of what is rounded is looked at as it is too."""
    said = model(x)
    return (said.round() - x[:, : said.shape[1]]).square().mean() + (said - said.round().detach()).square().mean()


def part_of_the_way(model: nn.Module, x: Tensor) -> Tensor:
    code = model(x)
    return through(code[2:], code[:2].tanh(), lambda code, nearest: code + 0.5 * (nearest - code))


def scaled_about_a_mean(model: nn.Module, x: Tensor) -> Tensor:
    said = model(x)
    mean = said.mean(1, keepdim=True).expand_as(said)
    return (mean + (said - mean) / (1 + (said - mean).square().mean()) - x[:, : said.shape[1]]).square().mean()


def density_of_a_flow(model: nn.Module, x: Tensor) -> Tensor:
    """A part of outputs and a constant less others of them, of which no error is taken."""
    said = model(x)
    code, logdet = x[:, : said.shape[1]] * said.tanh().exp(), said.tanh().sum(1)
    return (0.5 * code.square().sum(1) + 0.919 * said.shape[1] - logdet).mean()


WRONG_TERMS: tuple[Loop, ...] = tuple(
    Loop(program(made.__name__, made), rule=rule)
    for rule, made in (
        ("run.loss-misgiven", divided_behind_the_softmax),
        ("run.loss-misgiven", compared_with_itself),
        ("run.target-trains", trained_target),
        ("run.target-trains", trained_target_by_hand),
        ("run.target-trains", trained_target_of_a_critic),
        ("run.term-cancels", ratio_to_itself),
        ("run.term-cancels", ratio_to_itself_again),
        ("run.straight-through", quantized),
        ("run.straight-through", quantized_the_other_way),
        ("run.straight-through", quantized_remainder),
        ("run.slope-zero", rounded_on_the_way),
        ("run.masked-chosen", nearest_of_products),
        ("run.masked-chosen", nearest_of_filled),
    )
)
WRONG_TERMS += (*DRAWN, *LED)
RIGHT_TERMS: tuple[Loop, ...] = RIGHT_POLICIES + tuple(
    Loop(program(made.__name__, made))
    for made in (
        *(divided_before_the_softmax, masked_rows, rows_that_are_weighed, of_each_bit, of_pairs, of_a_mixture, of_maps),
        *(compared_with_others, masked_by_a_large_number, compared_with_the_other_view, as_many_classes_as_samples),
        *(resting_target, two_views_alike, two_views_in_other_units, residual_of_data, two_steps_as_one),
        *(code_of_a_code, equation, inner_step, slopes_of_each, nearest_of_others, nearest_past_a_large_number),
        *(
            rounded_straight_through,
            rounded_beside,
            straight_through,
            part_of_the_way,
            scaled_about_a_mean,
            density_of_a_flow,
        ),
        *(ratio_to_what_was, preferred, satisfied, weighed_by_nothing, from_a_prior, both_ways, hooked),
    )
)
