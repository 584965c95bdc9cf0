import numpy as np
import pytest
import torch

from bench.cases import CASES, GROWTH, QUICK, SHAPE, TRACE, from_traces, select
from bench.inputs import MOST_SETS, POISON, make_inputs, num_sets, set_bytes

SHAPES = {  # name: requests, tokens (None where they are drawn), columns
    "1_of_8192": (1, 8192, 8192),
    "64_of_128": (64, 8192, 8192),
    "64_of_8192": (64, 524_288, 8192),
    "256_of_128": (256, 32_768, 8192),
    "256_of_2048": (256, 524_288, 8192),
    "256_of_8192": (256, 2_097_152, 8192),
    "256_of_32768": (256, 8_388_608, 131_072),
    "4096_of_512": (4096, 2_097_152, 8192),
    "decode_4096": (4096, 4096, 8192),
    "decode_256": (256, 256, 131_072),
    "one_long_among_short": (256, None, 32_768),
    "few_long_among_short": (256, None, 16_384),
    "log_normal_510": (510, None, 131_072),
    "one_huge_among_short": (256, 1_000_765, 1_000_064),
}


def test_the_shapes_are_those_of_the_measured_table():
    shapes = {case.name: case for case in CASES if case.group == SHAPE}
    assert list(shapes) == list(SHAPES)
    for name, (num_reqs, num_tokens, columns) in SHAPES.items():
        lengths = shapes[name].segments().lengths
        assert (len(lengths), shapes[name].max_context_len) == (num_reqs, columns), name
        assert num_tokens is None or lengths.sum() == num_tokens, name


def test_growth_goes_from_ten_thousand_to_ten_million_tokens_and_from_one_to_a_hundred_thousand_requests():
    drawn = {case.name: case.segments().lengths for case in CASES if case.group == GROWTH}
    assert [int(drawn[f"tokens_1e{n}"].sum()) for n in (4, 5, 6, 7)] == [10**4, 10**5, 10**6, 10**7]
    assert [len(drawn[f"requests_1e{n}"]) for n in (0, 2, 4, 5)] == [1, 10**2, 10**4, 10**5]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_draws_the_same_batch_again_and_it_fits_its_pool(case):
    lengths, prefix_lens = case.segments()
    again = case.segments()
    assert np.array_equal(lengths, again.lengths)
    assert lengths.dtype == prefix_lens.dtype == np.int64
    assert lengths.min() >= 0
    assert (lengths + prefix_lens).max() <= case.max_context_len


def test_names_are_unique_and_globs_select_among_them():
    assert len({case.name for case in CASES}) == len(CASES)
    assert [case.name for case in select("decode_*")] == ["decode_4096", "decode_256"]
    assert {case.group for case in select(quick=True)} == {QUICK}
    assert QUICK not in {case.group for case in select()}


def test_quick_cases_have_an_empty_request_and_prefixes():
    drawn = [case.segments() for case in select(quick=True)]
    assert any((lengths == 0).any() for lengths, _ in drawn)
    assert any(prefix_lens.any() for _, prefix_lens in drawn)


def test_a_folder_of_traces_adds_a_prefill_and_a_decode_step_a_file(tmp_path):
    (tmp_path / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,48,10\n2023-11-16 18:17:04,31,8\n"
    )
    prefill, decode = from_traces(tmp_path)
    assert (prefill.name, decode.name, prefill.group) == ("azure_prefill", "azure_decode", TRACE)
    assert prefill.segments().lengths.tolist() == [48, 31]
    assert decode.segments().lengths.tolist() == [1, 1]
    assert decode.segments().prefix_lens.tolist() == [48, 31]
    assert [case.name for case in select("azure_*", traces=tmp_path)] == ["azure_prefill", "azure_decode"]


def test_sets_exceed_the_cache_within_bounds():
    assert num_sets(8_388_608, 256) == 3
    assert num_sets(2_097_152, 256) * 2_097_152 * 12 > 120_000_000
    assert num_sets(32_768, 256) * set_bytes(32_768, 256) > 120_000_000
    assert num_sets(256, 256) == num_sets(0, 0) == MOST_SETS


def test_sets_differ_in_tokens_rows_and_pool_and_expect_what_a_loop_writes():
    inputs = make_inputs(select("quick_with_prefix", quick=True)[0], torch.device("cpu"))
    first, second = inputs.sets
    assert first.pool is not second.pool
    assert not torch.equal(first.batch.token_ids, second.batch.token_ids)
    expected = torch.full_like(first.pool, POISON)
    layout = first.batch.layout
    for row, begin, part in zip(layout.req_pool_indices, layout.prefix_lens, first.batch.unbind(), strict=True):
        expected[row, begin : begin + len(part)] = part.int()
    assert torch.equal(inputs.expected, expected)
