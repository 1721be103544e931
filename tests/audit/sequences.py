"""Programs whose models take sequences or samples: they see too much, learn what they were given, or heed pads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

from tests.audit.case import adam
from tests.audit.loops import Loop, taken

WORDS, LENGTH, BATCH, PAD = 23, 12, 6, 0


def texts(*, pads: bool = False) -> Tensor:
    """Rows of different words; ``pads``: behind the first few of them."""
    rows = torch.randint(1, WORDS, (4 * BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    if pads:
        lengths = torch.arange(len(rows)) % 5 + 5
        rows[torch.arange(LENGTH) >= lengths[:, None]] = PAD
    return rows


def trained(model: nn.Module, loss_of: Callable[[nn.Module, Any], Tensor], *columns: Tensor) -> None:
    """One step on the first batch of a loader."""
    optimizer = adam(model)
    for batch in DataLoader(TensorDataset(*columns), batch_size=BATCH, shuffle=True):
        taken(model, optimizer, loss_of(model, batch))


def causal() -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(LENGTH)


class Language(nn.Module):
    """An embedding, one layer of a transformer, and a head over words."""

    def __init__(self, *, masks: bool = True, batch_first: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=batch_first)
        self.head = nn.Linear(16, WORDS)
        self.masks = masks

    def forward(self, tokens: Tensor) -> Tensor:
        mask = causal()[: tokens.shape[1], : tokens.shape[1]] if self.masks else None
        return self.head(self.layer(self.words(tokens), src_mask=mask))


class Recurrent(nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.cells = nn.LSTM(16, 16, **{"batch_first": True} | given)
        self.head = nn.Linear(32 if given.get("bidirectional") else 16, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cells(self.words(tokens))[0])


class Told(nn.Module):
    """As many small models that are trained themselves: with their targets given, they return their loss too."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.inside(tokens)
        loss = None if targets is None else fn.cross_entropy(logits.view(-1, WORDS), targets.reshape(-1))
        return logits, loss


def next_words(model: nn.Module, batch: Any) -> Tensor:
    (tokens,) = batch
    return fn.cross_entropy(model(tokens)[:, :-1].reshape(-1, WORDS), tokens[:, 1:].reshape(-1))


def next_by_channel(model: nn.Module, batch: Any) -> Tensor:
    (tokens,) = batch
    return fn.cross_entropy(model(tokens)[:, :-1].transpose(1, 2), tokens[:, 1:])


def next_of_cut(model: nn.Module, batch: Any) -> Tensor:
    (tokens,) = batch
    return fn.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


# --- right ---


def language(rank: int, world: int) -> None:
    trained(Language(), next_words, texts())


def language_of_cut_texts(rank: int, world: int) -> None:
    trained(Language(), next_by_channel, texts())


def recurrent_language(rank: int, world: int) -> None:
    trained(Recurrent(), next_of_cut, texts())


def language_that_returns_its_loss(rank: int, world: int) -> None:
    trained(Told(Language()), lambda model, batch: model(batch[0][:, :-1], batch[0][:, 1:])[1], texts())


def time_first(rank: int, world: int) -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        tokens = batch[0].T
        return fn.cross_entropy(model(tokens)[:-1].reshape(-1, WORDS), tokens[1:].reshape(-1))

    trained(Recurrent(batch_first=False), loss_of, texts())


def words_masked(rank: int, world: int) -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        (tokens,) = batch
        hidden = torch.rand(tokens.shape) < 0.3
        given = torch.where(hidden, torch.tensor(PAD), tokens)
        return fn.cross_entropy(model(given).transpose(1, 2), torch.where(hidden, tokens, torch.tensor(-100)))

    trained(Language(masks=False), loss_of, texts())


class Copies(nn.Module):
    """A transformer that is to say again what it has read, word by word."""

    def __init__(self, *, masks: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.both = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, WORDS)
        self.masks = masks

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = causal()[: target.shape[1], : target.shape[1]] if self.masks else None
        return self.head(self.both(self.words(source), self.words(target), tgt_mask=mask))


def say_again(model: nn.Module, batch: Any) -> Tensor:
    (tokens,) = batch
    return fn.cross_entropy(model(tokens, tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


def text_said_again(rank: int, world: int) -> None:
    trained(Copies(), say_again, texts())


def tagged(rank: int, world: int) -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        tokens, tags = batch
        return fn.cross_entropy(model(tokens).transpose(1, 2), tags)

    trained(Recurrent(bidirectional=True), loss_of, texts(), texts().flip(1))


class Judge(nn.Module):
    """Says one thing of a padded text, in the way that it is told."""

    def __init__(self, says: str) -> None:
        super().__init__()
        self.says = says
        self.words = nn.Embedding(WORDS, 16, padding_idx=PAD)
        if says.startswith("last"):
            self.cells = nn.LSTM(16, 16, batch_first=True)
        else:
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        real = tokens != PAD
        x, lengths = self.words(tokens), real.sum(1)
        match self.says:
            case "last, packed":
                packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
                return self.head(self.cells(packed)[1][0][-1])
            case "last":
                return self.head(self.cells(x)[0][:, -1])
            case "mean, masked":
                x = self.layer(x, src_key_padding_mask=~real)
                return self.head((x * real[..., None]).sum(1) / lengths[:, None])
            case "mean":
                return self.head(self.layer(x, src_key_padding_mask=~real).mean(1))
            case "first, inverted":
                return self.head(self.layer(x, src_key_padding_mask=real)[:, 0].nan_to_num())
            case "first":
                return self.head(self.layer(x)[:, 0])
            case _:
                raise AssertionError(self.says)


def judged(says: str) -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return fn.cross_entropy(model(batch[0]), batch[1])

    tokens = texts(pads=True)
    trained(Judge(says), loss_of, tokens, tokens[:, 0] % 2)


class OfOneLength(nn.Module):
    """Takes texts of one length alone, and a mask; ``inverted``: attends to what is none of the text."""

    def __init__(self, *, inverted: bool) -> None:
        super().__init__()
        self.inverted = inverted
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Parameter(torch.randn(LENGTH, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        pads = mask.bool() if self.inverted else ~mask.bool()
        x = self.layer(self.words(tokens) + self.places, src_key_padding_mask=pads) * mask[..., None]
        return self.head(x.sum(1) / mask.sum(1, keepdim=True))


def of_one_length(*, inverted: bool) -> Callable[[int, int], None]:
    def run(rank: int, world: int) -> None:
        tokens = texts(pads=True)
        mask = (tokens != PAD).float()
        trained(OfOneLength(inverted=inverted), goes, tokens, mask)

    def goes(model: nn.Module, batch: Any) -> Tensor:
        return fn.cross_entropy(model(*batch), batch[0][:, 0] % 2)

    run.__name__ = "mask_inverted_of_one_length" if inverted else "masked_of_one_length"
    return run


def padded_and_packed(rank: int, world: int) -> None:
    judged("last, packed")


def padded_and_masked(rank: int, world: int) -> None:
    judged("mean, masked")


def bert(*, masked: bool, labels: bool = False) -> None:
    from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 1}
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, pad_token_id=PAD, num_labels=3, **sizes)
    model: Any = (BertForTokenClassification if labels else BertForSequenceClassification)(config)

    def loss_of(model: Any, batch: Any) -> Tensor:
        (tokens,) = batch
        given = {"attention_mask": (tokens != PAD).long()} if masked else {}
        tags = torch.where(tokens == PAD, torch.tensor(0), tokens % 3) if labels else tokens[:, 0] % 3
        return model(input_ids=tokens, labels=tags, **given).loss  # type: ignore[no-any-return]

    trained(model, loss_of, texts(pads=True))


def bert_with_its_mask(rank: int, world: int) -> None:
    bert(masked=True)


class Layers(nn.Module):
    """A classifier of samples, by what it is given."""

    def __init__(self, middle: nn.Module, call: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.enter, self.middle, self.head = nn.Linear(16, 16), middle, nn.Linear(16, 3)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.enter(x))
        return self.head(self.middle(x) if self.call is None else self.call(self.middle, x))


def classified(model: nn.Module, *shape: int) -> None:
    x = torch.randn(4 * BATCH, *shape, 16, generator=torch.Generator().manual_seed(5))
    y = torch.arange(len(x)) % 3

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        return fn.cross_entropy(out if out.dim() == 2 else out.mean(1), batch[1])

    trained(model, loss_of, x, y)


def batch_norm(rank: int, world: int) -> None:
    classified(Layers(nn.BatchNorm1d(16)))


def batch_norm_of_each_batch(rank: int, world: int) -> None:
    classified(Layers(nn.BatchNorm1d(16, track_running_stats=False)))


class MinibatchDeviation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.std(0).mean()


def deviation_of_a_batch(rank: int, world: int) -> None:
    classified(Layers(MinibatchDeviation()))


def attends(attention: Any, x: Tensor) -> Tensor:
    return attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def attention_over_places(rank: int, world: int) -> None:
    classified(Layers(nn.MultiheadAttention(16, 2, batch_first=True), attends), 5)


def attention_of_turned_samples(rank: int, world: int) -> None:
    turned = lambda attention, x: attends(attention, x.transpose(0, 1)).transpose(0, 1)  # noqa: E731
    classified(Layers(nn.MultiheadAttention(16, 2), turned), 5)


class Remembers(nn.Module):
    """Goes on from where the last batch has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.state = nn.GRUCell(16, 16), torch.zeros(BATCH, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.cells(x, self.state.detach())
        return self.state


def state_that_goes_on(rank: int, world: int) -> None:
    classified(Layers(Remembers()))


def dropout_by_mode(rank: int, world: int) -> None:
    drops = lambda inside, x: fn.dropout(inside(x), 0.2, training=inside.training)  # noqa: E731
    classified(Layers(nn.Linear(16, 16), drops))


def dropout_on_purpose(rank: int, world: int) -> None:
    classified(Layers(nn.Linear(16, 16), lambda inside, x: fn.dropout(inside(x), 0.2, training=True)))


class Bags(nn.Module):
    """Means of the words of two texts, without their pads."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Embedding(WORDS, 16, padding_idx=PAD), nn.Linear(16, 16)

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (
            self.head(self.enter(text).sum(1) / (text != PAD).sum(1, keepdim=True)) for text in (one, other)
        )
        return first, second


def matched(model: nn.Module, batch: Any) -> Tensor:
    first, second = model(*batch)
    return fn.cross_entropy(first @ second.T, torch.arange(len(first)))


def two_texts_of_one_width(rank: int, world: int) -> None:
    trained(Bags(), matched, texts(), texts(pads=True))


RIGHT_SEQUENCES: tuple[Loop, ...] = (
    *map(Loop, (language, language_of_cut_texts, recurrent_language, language_that_returns_its_loss, time_first)),
    *map(Loop, (words_masked, text_said_again, tagged, padded_and_packed, padded_and_masked)),
    Loop(two_texts_of_one_width),
    Loop(of_one_length(inverted=False)),
    Loop(bert_with_its_mask, "transformers"),
    *map(Loop, (batch_norm, batch_norm_of_each_batch, deviation_of_a_batch, attention_over_places)),
    *map(Loop, (attention_of_turned_samples, state_that_goes_on, dropout_by_mode, dropout_on_purpose)),
)


# --- wrong ---


def sees_what_comes(rank: int, world: int) -> None:
    trained(Language(masks=False), next_words, texts())


def reads_both_ways(rank: int, world: int) -> None:
    trained(Recurrent(bidirectional=True), next_of_cut, texts())


def decoder_without_a_mask(rank: int, world: int) -> None:
    trained(Copies(masks=False), say_again, texts())


def forecast_of_what_it_reads(rank: int, world: int) -> None:
    x = torch.randn(4 * BATCH, LENGTH, 3, generator=torch.Generator().manual_seed(5))

    class Forecast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = nn.GRU(3, 16, batch_first=True, bidirectional=True), nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cells(x)[0])

    trained(Forecast(), lambda model, batch: fn.mse_loss(model(batch[0][:, :-1]), batch[0][:, 1:]), x)


def learns_what_it_was_given(rank: int, world: int) -> None:
    trained(Told(Language()), lambda model, batch: model(batch[0], batch[0])[1], texts())


def outputs_cut_at_the_wrong_end(rank: int, world: int) -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        (tokens,) = batch
        return fn.cross_entropy(model(tokens)[:, 1:].reshape(-1, WORDS), tokens[:, 1:].reshape(-1))

    trained(Recurrent(), loss_of, texts())


def shifted_twice(rank: int, world: int) -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        given, goal = batch[0][:, :-1], batch[0][:, 1:]
        return fn.cross_entropy(model(given)[:, :-1].reshape(-1, WORDS), goal[:, 1:].reshape(-1))

    trained(Language(), loss_of, texts())


def layer_over_the_batch(rank: int, world: int) -> None:
    trained(Language(batch_first=False, masks=False), next_words, texts())


def attention_over_samples(rank: int, world: int) -> None:
    classified(Layers(nn.MultiheadAttention(16, 2), attends), 5)


def softmax_over_samples(rank: int, world: int) -> None:
    classified(Layers(nn.Linear(16, 16), lambda inside, x: x * fn.softmax(inside(x), dim=0)))


def places_taken_for_samples(rank: int, world: int) -> None:
    classified(Layers(nn.Identity(), lambda _, x: x.transpose(0, 1).reshape(x.shape[0], -1, 16)), 5)


def last_of_padded(rank: int, world: int) -> None:
    judged("last")


def mean_over_pads(rank: int, world: int) -> None:
    judged("mean")


def mask_forgotten(rank: int, world: int) -> None:
    judged("first")


def mask_inverted(rank: int, world: int) -> None:
    judged("first, inverted")


def bert_without_its_mask(rank: int, world: int) -> None:
    bert(masked=False)


def tags_of_pads(rank: int, world: int) -> None:
    bert(masked=True, labels=True)


def pads_in_the_loss(rank: int, world: int) -> None:
    trained(Language(), next_words, texts(pads=True))


def drops_always(rank: int, world: int) -> None:
    classified(Layers(nn.Linear(16, 16), lambda inside, x: fn.dropout(inside(x), 0.2)))


def attention_that_drops_always(rank: int, world: int) -> None:
    def attend(inside: nn.Module, x: Tensor) -> Tensor:
        x = inside(x)
        return fn.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

    classified(Layers(nn.Linear(16, 16), attend), 5)


WRONG_SEQUENCES: tuple[Loop, ...] = (
    *(Loop(run, rule="run.sees-ahead") for run in (sees_what_comes, reads_both_ways, decoder_without_a_mask)),
    Loop(forecast_of_what_it_reads, rule="run.sees-ahead"),
    *(Loop(run, rule="run.shifted") for run in (learns_what_it_was_given, outputs_cut_at_the_wrong_end, shifted_twice)),
    *(
        Loop(run, rule="run.samples-mix")
        for run in (layer_over_the_batch, attention_over_samples, softmax_over_samples)
    ),
    Loop(places_taken_for_samples, rule="run.samples-mix"),
    *(Loop(run, rule="run.pads-heeded") for run in (last_of_padded, mean_over_pads, mask_forgotten, mask_inverted)),
    Loop(of_one_length(inverted=True), rule="run.pads-heeded"),
    Loop(bert_without_its_mask, "transformers", rule="run.pads-heeded"),
    Loop(tags_of_pads, "transformers", rule="run.pads-learned"),
    Loop(pads_in_the_loss, rule="run.pads-learned"),
    *(Loop(run, rule="run.drops-evaluating") for run in (drops_always, attention_that_drops_always)),
)
