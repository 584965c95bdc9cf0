"""A minimal engine: continuous batching of a tiny transformer with a paged KV cache, in plain torch.

Run it with ``python examples/engine.py``. Each step feeds a ragged batch, chunks of prompts and single decode tokens
together, and a canary watches the KV slots. The tokens are those that each sequence gives alone.
"""

from __future__ import annotations

import attrs
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from kv_canary import KVCanary, KVSource, TokenPool
from ragged import RaggedBatch, RaggedBatchBuilder
from ragged.attention import AttentionMetadata

VOCAB, DIM, HEADS, LAYERS = 97, 32, 4, 2
PAGE_SIZE, NUM_PAGES, MAX_REQS, MAX_LEN = 4, 64, 8, 40


class Layer(nn.Module):
    """Attention over a paged cache, then a feed-forward; pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.feed = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor, cache: torch.Tensor, found: AttentionMetadata) -> torch.Tensor:
        """x [num_tokens, DIM]; cache [num_slots, 2, HEADS, DIM // HEADS], written at ``slot_mapping``."""
        query, key, value = self.qkv(self.norm(x)).view(-1, 3, HEADS, DIM // HEADS).unbind(1)
        cache[found.slot_mapping] = torch.stack([key, value], 1)
        bounds, pages = found.query_start_loc.tolist(), found.kv_indptr.tolist()
        attended = torch.empty_like(query)
        for request, length in enumerate(found.seq_lens.tolist()):
            begin, end = bounds[request], bounds[request + 1]
            own = found.kv_indices[pages[request] : pages[request + 1]].to(torch.int64)
            slots = (own[:, None] * found.page_size + torch.arange(found.page_size)).reshape(-1)[:length]
            keys, values = cache[slots].unbind(1)
            mask = torch.arange(length) <= found.positions[begin:end, None]
            attended[begin:end] = scaled_dot_product_attention(
                query[begin:end].transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=mask
            ).transpose(0, 1)
        x = x + self.out(attended.reshape(-1, DIM))
        return x + self.feed(self.norm_2(x))


class Model(nn.Module):
    """Random weights: what it says means nothing, and is the same every time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(MAX_LEN, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, batch: RaggedBatch, caches: list[torch.Tensor], found: AttentionMetadata) -> torch.Tensor:
        """Logits [num_reqs, VOCAB] of each request's last token."""
        x = self.tokens(batch.token_ids) + self.places(found.positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, found)
        logits: torch.Tensor = self.head(x[batch.last_token_indices])
        return logits


@attrs.define
class Sequence:
    """A request: its row, its tokens, how many of them are in the cache, its pages."""

    row: int
    tokens: list[int]
    wanted: int
    computed: int = 0
    pages: list[int] = attrs.field(factory=list)
    logits: list[torch.Tensor] = attrs.field(factory=list)


class Engine:
    """Chunked prefill and decode in one batch a step."""

    def __init__(self, model: Model, prefill_budget: int = 8) -> None:
        self.model, self.prefill_budget = model, prefill_budget
        num_slots = NUM_PAGES * PAGE_SIZE
        self.caches = [torch.zeros(num_slots, 2, HEADS, DIM // HEADS) for _ in range(LAYERS)]
        self.block_table = torch.zeros(MAX_REQS, MAX_LEN // PAGE_SIZE, dtype=torch.int32)
        self.slots = torch.zeros(MAX_REQS, MAX_LEN, dtype=torch.int32)  # the same by position, for the canary
        self.free_pages = list(range(NUM_PAGES - 1, 0, -1))
        self.builder = RaggedBatchBuilder(pool_shape=(MAX_REQS, MAX_LEN), vocab_size=VOCAB)
        self.pool = TokenPool.allocate(MAX_REQS, MAX_LEN, device="cpu")
        self.canary = KVCanary.allocate(num_slots, device="cpu", pool=self.pool, mode="raise")
        self.sources = [KVSource(cache, 2 * DIM * 4) for cache in self.caches]

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[Sequence]:
        """Greedy continuations of all prompts, batched."""
        running = [Sequence(row, list(prompt), num_tokens) for row, prompt in enumerate(prompts, 1)]
        done: list[Sequence] = []
        while running:
            self._step(running)
            done += [each for each in running if not each.wanted]
            running = [each for each in running if each.wanted]
        return sorted(done, key=lambda each: each.row)

    def _step(self, running: list[Sequence]) -> None:
        budget = self.prefill_budget
        taken: list[tuple[Sequence, int]] = []
        for each in running:
            length = min(len(each.tokens) - each.computed, budget)
            if length:
                budget -= length
                taken.append((each, length))
        for each, length in taken:
            while len(each.pages) * PAGE_SIZE < each.computed + length:
                each.pages.append(self.free_pages.pop())
                first = (len(each.pages) - 1) * PAGE_SIZE
                self.block_table[each.row, len(each.pages) - 1] = each.pages[-1]
                own = torch.arange(PAGE_SIZE, dtype=torch.int32) + each.pages[-1] * PAGE_SIZE
                self.slots[each.row, first : first + PAGE_SIZE] = own
        rows, starts = [each.row for each, _ in taken], [each.computed for each, _ in taken]
        parts = [each.tokens[each.computed : each.computed + length] for each, length in taken]
        self.builder.extend(rows, parts, prefix_lens=starts)
        batch = self.builder.build()
        found = AttentionMetadata.from_block_table(batch, self.block_table, PAGE_SIZE)
        logits = self.model(batch, self.caches, found)

        self.pool.append(batch)
        seeds = [int(self.slots[row, start - 1]) if start else -1 for row, start in zip(rows, starts, strict=True)]
        self.canary.write(batch, found.slot_mapping, seed_slots=seeds, kv_sources=self.sources)
        self.canary.verify(self.slots, rows, found.seq_lens.tolist(), kv_sources=self.sources)
        self.canary.step()

        for (each, length), line in zip(taken, logits, strict=True):
            each.computed += length
            if each.computed == len(each.tokens):
                each.logits.append(line)
                each.tokens.append(int(line.argmax()))
                each.wanted -= 1


def main() -> None:
    """Three prompts together, and each alone."""
    prompts = [[1, 2, 3], [5] * 11, [7, 8, 9, 10, 11]]
    model = Model().eval()
    together = Engine(model).generate(prompts, 6)
    for prompt, sequence in zip(prompts, together, strict=True):
        [alone] = Engine(model, prefill_budget=64).generate([prompt], 6)
        same = alone.tokens == sequence.tokens
        print(sequence.tokens[len(prompt) :], "the same alone" if same else f"DIFFERENT alone: {alone.tokens}")


if __name__ == "__main__":
    main()
