"""``headrace explain``: how one prompt attends, head by head."""

from __future__ import annotations

import sys

from headrace.cli.options import ENGINE_OPTIONS, Group, command
from headrace.cli.own_options import ExplainOptions
from headrace.config import EngineArgs
from headrace.host.user_files import write_output


@command(args=ENGINE_OPTIONS.without("enable_prefix_caching"), options=Group.of(ExplainOptions))
def explain(args: EngineArgs, options: ExplainOptions) -> None:
    """Compute one prompt and say how it attends: the density of each layer and head, and what a model's router decided.

    For models with elastic attention, and for others with --sparse-prefill.
    """
    text = options.text
    import msgspec

    from headrace.cli.heatmap import page
    from headrace.cli.heatmap import png as picture
    from headrace.frontend.explain import explain as look
    from headrace.frontend.llm import LLM

    with LLM(**vars(args) | {"enable_prefix_caching": False}) as llm:
        found = look(llm, text, layer=options.layer, head=options.head)
    if options.png is not None:
        write_output(options.png, picture(found), "--png")
    if options.html is not None:
        write_output(options.html, page(found).encode(), "--html")
    if options.as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return
    report = found.report
    density = "none" if report.density is None else f"{report.density:.3f}"
    how = "" if report.exact else ", routed in segments"
    print(f"{found.prompt_tokens} tokens, {report.mode}, threshold {report.threshold}: density {density}{how}")
    for number, (mean, heads) in enumerate(zip(report.layers, found.heads, strict=True)):
        kinds = " | ".join(" ".join(segment[number]) for segment in report.head_types)
        numbers = "dense" if mean is None else f"{mean:.3f}: " + " ".join(f"{one:.2f}" for one in heads if one is not None)
        print(f"layer {number:3} {numbers}{f'  ({kinds})' if kinds else ''}")
