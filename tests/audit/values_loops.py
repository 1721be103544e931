"""Programs that put values where they do not belong, or lose them, on the way to a loss; and their right neighbours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from tests.audit.case import adam
from tests.audit.loops import Loop, taken

Change = Callable[[Tensor], Tensor]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def changed(name: str, shape: tuple[int, ...], change: Change, *, before: Change = lambda one: one) -> Loop:
    """One step of a program that does this to a tensor of this shape."""

    def run(rank: int, world: int) -> None:
        x = change(before(drawn(*shape)))
        model = nn.Linear(x.shape[-1], 4)
        taken(model, adam(model), model(x).square().mean())

    run.__name__ = name
    return Loop(run)


def shapes_of_what_is_compiled(rank: int, world: int) -> None:
    model = nn.Linear(6, 4)
    step = torch.compile(lambda x: model(x.transpose(1, 2).reshape(4, 5, 6)).square().mean(), backend="eager")
    taken(model, adam(model), step(drawn(4, 6, 5)))


def shapes_of_what_is_scripted(rank: int, world: int) -> None:
    model = nn.Linear(6, 4)
    taken(model, adam(model), torch.jit.script(joined)(model(drawn(4, 5, 6))).square().mean())


def joined(one: Tensor) -> Tensor:
    return torch.reshape(one, (20, 4)).view(-1)


def indexed(name: str, numbers: Tensor, cast: Change) -> Loop:
    """One step of a model of features that were made whole numbers."""

    def run(rank: int, world: int) -> None:
        table, model = nn.Embedding(40, 8), nn.Linear(8, 4)
        both = nn.ModuleList([table, model])
        whole = cast(numbers).long()
        taken(both, adam(both), fn.cross_entropy(model(table(whole)), torch.arange(len(numbers)) % 4))

    run.__name__ = name
    return Loop(run)


def segmented(name: str, mode: str, goal: Callable[[Tensor], Tensor], classes: int = 4) -> Loop:
    """One step of a segmentation whose masks were resized."""

    def run(rank: int, world: int) -> None:
        model = nn.Conv2d(3, classes, 3, padding=1)
        corners = {} if mode == "nearest" else {"align_corners": False}
        masks = (drawn(2, 1, 16, 16) * 8).abs().round() % classes
        y = goal(fn.interpolate(masks, size=11, mode=mode, **corners)[:, 0])
        taken(model, adam(model), fn.cross_entropy(model(drawn(2, 3, 11, 11)), y))

    run.__name__ = name
    return Loop(run)


EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 5, 4], [1, 1, 2, 2, 0, 0, 1, 3]])
APART = torch.tensor([[0, 1, 2, 3, 4, 5, 5, 4], [1, 2, 0, 3, 4, 5, 6, 7]])


def summed(name: str, add: Callable[[Tensor, Tensor, Tensor], Tensor], edges: Tensor = EDGES) -> Loop:
    """One step of a layer that sums what it makes of one end of each edge at the other."""

    def run(rank: int, world: int) -> None:
        enters, leaves = nn.Linear(6, 5), nn.Linear(5, 4)
        hidden = enters(drawn(8, 6))
        made = add(torch.zeros_like(hidden), edges[1], hidden[edges[0]])
        both = nn.ModuleList([enters, leaves])
        taken(both, adam(both), leaves(made).square().mean())

    run.__name__ = name
    return Loop(run)


def adds_at(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    total[ids] += sent
    return total


def adds_spelled_out(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    total[ids] = total[ids] + sent * 0.5
    return total


def subtracts_in_columns(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    turned = total.T.contiguous()
    turned[:, ids] -= sent.T
    return turned.T


def adds_at_pairs(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    total[ids, ids % 5] += sent[:, 0]
    return total


def counts(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    degrees = torch.zeros(8)
    degrees[ids] += 1
    return total.index_add(0, ids, sent) / degrees.clamp(min=1)[:, None]


def writes_columns_of_chosen_rows(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    part = torch.ones(8, 5)
    part[total.detach().sum(1) < 1][:, :2] = 0.5
    return adds_by_index_add(total, ids, sent) * part


def scales_columns_of_named_rows(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    part = torch.ones(8, 5)
    part[[0, 2]][:, 1] *= 0.5
    return adds_by_index_add(total, ids, sent) * part


def zeroes_chosen_rows(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    part = torch.ones(8, 5)
    part[part.sum(1) > 1].zero_()
    return adds_by_index_add(total, ids, sent) * part


def clamps_named_rows(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    part = torch.ones(8, 5)
    part[[0, 2]].clamp_(max=0.5)
    return adds_by_index_add(total, ids, sent) * part


def changes_what_is_held(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    part, parts = torch.ones(8, 5), {"one": torch.ones(8, 5)}
    part[:2].zero_()
    part[3].fill_(2)
    parts["one"].mul_(0.5)
    part[[4, 5]] = part[[4, 5]].mul_(3)
    drawn = part[[6]].normal_()
    return adds_by_index_add(total, ids, sent) * part * parts["one"] + 0 * drawn


def writes_to_what_is_held(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    parts, part = [torch.ones(8, 5), torch.ones(8, 5)], torch.ones(8, 5)
    known = {"part": part[[*range(8)]]}
    parts[0][[0, 2]] = 0.5
    parts[1][1:][:, :2] = 0.5
    known["part"][:, :2] = 0.5
    chosen = part[[0, 2]]
    chosen[:, :2] = 0.5
    part[[0, 2]] = chosen
    part[[0, 2]] *= 2
    part.numpy()[4:6][:, :1] = 0.5
    return adds_by_index_add(total, ids, sent) * parts[0] * parts[1] * part * known["part"]


def writes_to_what_is_held_under_a_device(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    """Which is a mode of torch that calls each function once more."""
    with torch.device("cpu"):
        return writes_to_what_is_held(total, ids, sent)


def adds_by_index_add(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    total.index_add_(0, ids, sent)
    return total


def adds_by_index_put(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    total.index_put_((ids,), sent, accumulate=True)
    return total


def adds_by_a_mask(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    total[torch.arange(8) % 2 == 0] += sent[:4]
    return total


def keeps_the_last(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    total[ids] = sent
    total[:4] += sent[:4]
    return total


def adds_the_same(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    gradient = drawn(8, 5)
    total[ids] -= 0.1 * gradient[ids]
    return total + adds_by_index_add(total, ids, sent)


def moves_towards(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    centres = drawn(8, 5)
    centres[ids] += 0.1 * (sent.detach() - centres[ids])
    return adds_by_index_add(total, ids, sent) - centres


def marks_present(total: Tensor, ids: Tensor, sent: Tensor) -> Tensor:
    logits = adds_by_index_add(total, ids, sent)
    logits[ids] -= 1.5
    present = torch.zeros(8)
    present[ids] += 1
    return logits * (present > 0)[:, None]


class Options:
    """What a program is told, and a count of what it has drawn."""

    seed = 1234

    def __init__(self) -> None:
        self.count = 7

    def next_noise(self, x: Tensor) -> Tensor:
        self.count += 1
        torch.manual_seed(self.count)
        return torch.randn_like(x)


OPTIONS = Options()


def seeded(name: str, noise: Callable[[int, Tensor], Tensor]) -> Loop:
    """A loop that draws noise by a function."""

    def run(rank: int, world: int) -> None:
        model = nn.Linear(6, 4)
        optimizer = adam(model)
        for at in range(3):
            x = drawn(8, 6)
            taken(model, optimizer, model(x + 0.1 * noise(at, x)).square().mean())

    run.__name__ = name
    return Loop(run)


def by_default(at: int, x: Tensor, seed: int = 42) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn_like(x)


def scaled_by_default(at: int, x: Tensor) -> Tensor:
    return 0.5 * by_default(at, x)


def seeds_all(seed: int) -> None:
    torch.manual_seed(seed)


def by_options(at: int, x: Tensor) -> Tensor:
    seeds_all(OPTIONS.seed)
    return torch.randn_like(x)


def by_keyword(at: int, x: Tensor) -> Tensor:
    number = 3
    seeds_all(seed=number + 1)
    return torch.randn_like(x)


def by_step(at: int, x: Tensor) -> Tensor:
    seeds_all(1000 + at)
    return torch.randn_like(x)


def at_first(at: int, x: Tensor) -> Tensor:
    if at == 0:
        seeds_all(42)
    return torch.randn_like(x)


def put_back(at: int, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        seeds_all(42)
        shown = torch.randn_like(x)
    return torch.randn_like(x) + 0 * shown


def put_back_by_hand(at: int, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    shown = by_default(at, x)
    torch.set_rng_state(state)
    return torch.randn_like(x) + 0 * shown


def by_another_generator(at: int, x: Tensor) -> Tensor:
    generator = torch.Generator()
    generator.manual_seed(42)
    return torch.randn(x.shape, generator=generator) + torch.randn_like(x)


def draws_nothing(at: int, x: Tensor) -> Tensor:
    seeds_all(42)
    return torch.zeros_like(x)


def asked_by_lbfgs(rank: int, world: int) -> None:
    model = nn.Linear(6, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(by_default(0, drawn(8, 6))).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]


FRACTIONS = torch.linspace(-0.9, 0.9, 32)


def wrong(rule: str, *loops: Loop) -> tuple[Loop, ...]:
    return tuple(Loop(one.run, rule=rule) for one in loops)


WRONG_VALUES: tuple[Loop, ...] = (
    *wrong(
        "run.view-permutes",
        changed("image_viewed", (16, 16, 3), lambda x: x.view(3, 16, 16)),
        changed("tags_viewed", (4, 12, 5), lambda x: x.view(4, 5, 12)),
        changed("tags_viewed_that_divide", (4, 12, 6), lambda x: x.reshape(4, 6, 12)),
        changed("features_reshaped", (4, 8, 6, 10), lambda x: torch.reshape(x, (len(x), 10, -1))),
        changed("image_to_patches", (2, 5, 4, 4), lambda x: x.view(2, 16, 5)),
        changed("heads_merged", (2, 4, 7, 6), lambda x: x.reshape(2, 7, 24)),
        changed("two_directions_merged", (2, 8, 6), lambda x: x.view(8, -1)),
    ),
    *wrong(
        "run.sums-lost",
        summed("messages_added_at_places", adds_at),
        summed("messages_added_spelled_out", adds_spelled_out),
        summed("messages_subtracted_in_columns", subtracts_in_columns),
        summed("messages_added_at_pairs", adds_at_pairs),
        summed("degrees_counted_at_places", counts),
    ),
    *wrong(
        "run.written-away",
        summed("columns_of_chosen_rows_written", writes_columns_of_chosen_rows),
        summed("columns_of_named_rows_scaled", scales_columns_of_named_rows),
        summed("chosen_rows_zeroed", zeroes_chosen_rows),
        summed("named_rows_clamped", clamps_named_rows),
    ),
    *wrong(
        "run.reseeded-steps",
        seeded("noise_seeded_by_default", scaled_by_default),
        seeded("noise_seeded_by_options", by_options),
        seeded("noise_seeded_by_keyword", by_keyword),
    ),
    *wrong("run.classes-blended", segmented("classes_interpolated", "bilinear", lambda one: one.long())),
    *wrong("run.cast-to-nothing", indexed("fractions_as_classes", FRACTIONS, lambda one: one.to(torch.int64))),
    *wrong(
        "run.cast-to-nothing", indexed("fractions_typed", FRACTIONS.expand(2, 32)[0], lambda one: one.type(torch.int))
    ),
)
RIGHT_VALUES: tuple[Loop, ...] = (
    summed("messages_of_one_each", adds_at, APART),
    summed("held_rows_changed", changes_what_is_held),
    summed("written_to_what_is_held", writes_to_what_is_held),
    summed("written_to_what_is_held_under_a_device", writes_to_what_is_held_under_a_device),
    summed("messages_added_by_index_add", adds_by_index_add),
    summed("messages_added_by_index_put", adds_by_index_put),
    summed("messages_added_by_a_mask", adds_by_a_mask),
    summed("messages_of_which_the_last_is_kept", keeps_the_last),
    summed("gradients_of_rows_stepped_once", adds_the_same),
    summed("centres_moved_in_turn", moves_towards),
    summed("presence_marked", marks_present),
    seeded("noise_seeded_by_step", by_step),
    seeded("noise_seeded_at_first", at_first),
    seeded("noise_seeded_and_put_back", put_back),
    seeded("noise_seeded_and_put_back_by_hand", put_back_by_hand),
    seeded("noise_of_another_generator", by_another_generator),
    seeded("noise_seeded_by_a_count", lambda at, x: OPTIONS.next_noise(x)),
    seeded("noise_seeded_and_not_drawn", draws_nothing),
    Loop(asked_by_lbfgs),
    segmented("classes_of_the_nearest", "nearest", lambda one: one.long()),
    segmented("two_classes_by_a_threshold", "bilinear", lambda one: (one > 0.5).long(), 2),
    segmented("two_classes_rounded", "bilinear", lambda one: one.round().long(), 2),
    changed("one_row", (1, 8), lambda x: x.view(8, 1)),
    changed("square", (8, 8), lambda x: x.view(8, 8)),
    changed("images_flattened", (4, 3, 6, 5), lambda x: x.reshape(4, -1)),
    changed("rows_merged", (4, 6, 5), lambda x: x.view(-1, 5)),
    changed("rows_parted", (24, 5), lambda x: x.view(4, 6, 5)),
    changed("frames_stacked", (24, 6), lambda x: x.view(6, -1)),
    changed("frames_of_a_sample_stacked", (3, 12, 4), lambda x: x.view(3, x.shape[1] // 3, -1)),
    changed(
        "heads_parted_and_merged",
        (2, 7, 24),
        lambda x: x.view(2, 7, 4, 6).transpose(1, 2).transpose(1, 2).reshape(2, 7, 24),
    ),
    changed("heads_moved", (2, 4, 7, 6), lambda x: x.transpose(1, 2).reshape(2, 7, 24)),
    changed("shifted_rows", (2, 5, 6), lambda x: x.view(2, 6, 5)[:, 1:]),
    changed(
        "padded_and_skewed",
        (2, 5, 4),
        lambda x: x.reshape(2, 9, 5),
        before=lambda x: fn.pad(x.requires_grad_(), (0, 5)),
    ),
    changed("channels_shuffled", (2, 8, 3), lambda x: x.view(2, 2, 4, 3).transpose(1, 2).reshape(2, 8, 3)),
    changed("permuted_before", (2, 5, 7), lambda x: x.transpose(1, 2).reshape(2, 5, 7)),
    changed("made_anew", (6, 4), lambda x: torch.randn(6, 4).view(4, 6)),
    Loop(shapes_of_what_is_compiled),
    Loop(shapes_of_what_is_scripted),
    indexed("one_hot", fn.one_hot(torch.arange(32) % 3).float()[:, 0], lambda one: one.long()),
    indexed("constant_numbers", torch.full((32,), 0.5), lambda one: one.long()),
    indexed("rounded", torch.linspace(0.1, 0.9, 32), lambda one: one.round().int()),
    indexed("binned", torch.linspace(0, 0.99, 32), lambda one: (one * 40).long()),
    indexed("few", torch.linspace(0, 0.99, 8), lambda one: one.long()),
)
