"""SGLang's launcher after its pull request 31709, as installed or as in the file that BENCH_SGLANG_PR names."""

from __future__ import annotations

from bench.providers.sglang import SGLang


class SGLangPR(SGLang):
    """With its pull request 31709."""

    name = "sglang_pr"
    summary = "SGLang's pull request 31709: a program per request and column block"
    variable = "BENCH_SGLANG_PR"
    has_pr = True
