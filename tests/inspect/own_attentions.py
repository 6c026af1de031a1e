"""Attentions as people have them, right and wrong beside the specs of `tests.inspect.test_against`."""

import math

import torch
import torch.nn.functional as F

HEADS = 4
slopes = torch.tensor([2.0 ** (-8 * (i + 1) / HEADS) for i in range(HEADS)])
document = torch.arange(40).div(13, rounding_mode="floor").expand(2, 40)


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_softmax(q, k, v, *, scale=0.125, offset=0, fill=-math.inf, bias=None):
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    scores = q @ k.mT * scale + (0.0 if bias is None else bias * (keys - rows))
    return scores.masked_fill(keys > rows + offset, fill).softmax(-1) @ v


def without_itself(q, k, v):
    return by_softmax(q, k, v, offset=-1)


def with_the_next(q, k, v):
    return by_softmax(q, k, v, offset=1)


def unscaled(q, k, v):
    return by_softmax(q, k, v, scale=1.0)


def aligned_to_the_end(q, k, v):
    return by_softmax(q, k, v, offset=k.shape[2] - q.shape[2])


def flash_like(q, k, v, causal=True):
    return sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def with_slopes(q, k, v, slopes):
    return by_softmax(q, k, v, bias=slopes[:, None, None])


def without_gradients(q, k, v):
    return sdpa(q, k, v).detach()


def with_wrong_gradients(q, k, v):
    return sdpa(q, k.detach() + 0.5 * (k - k.detach()), v)


def other_key_heads(q, k, v):
    return sdpa(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


def window_of_one_more(q, k, v, size=60):
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    scores = (q @ k.mT * 0.125).masked_fill((keys > rows) | (rows - keys > size), -math.inf)
    return scores.softmax(-1) @ v


def with_a_sink(q, k, v):
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    scores = (q @ k.mT * 0.125).masked_fill(keys > rows, -math.inf)
    return F.pad(scores, (0, 1)).softmax(-1)[..., :-1] @ v


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, query, key, value):
        return sdpa(query, key, value * self.factor), None


layer = Layer()


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def alibi(score, b, h, q_idx, kv_idx):
    return score + slopes[h] * (kv_idx - q_idx)


def alibi_of_the_next_head(score, b, h, q_idx, kv_idx):
    return score + slopes[(h + 1) % HEADS] * (kv_idx - q_idx)


def packed(b, h, q_idx, kv_idx):
    return (document[b, q_idx] == document[b, kv_idx]) & (q_idx >= kv_idx)


def packed_forgotten(b, h, q_idx, kv_idx):
    return (document[b, kv_idx] == document[b, kv_idx]) & (q_idx >= kv_idx)


def of_four(q, k, v, nonsense):
    return q


def fails(q, k, v):
    return q[99]


def of_seven(a, b, c, d, e, f, g):
    return a
