"""Why points differ, where it is known; and what the words in the sources mean.

What cannot be explained is not explained: a difference without a note is just a difference.
"""

from planner.latency.fitted import UNMEASURED_MIX

CURVES = (
    "measured: one run per point, from the authors' result notebook; as printed, or read off the "
    "figure to half a point or a point"
)
BAND = (
    "simulated: the mean over seeds; the range is where one more run of that length would lie in "
    "95 of 100 cases. distserve-raw: the published fits without the factors that were set by "
    "hand; vllm-added: vLLM's fits with those factors as seconds of the engine's own per step, as "
    "they come out for OPT-13B"
)
PRINTED_99 = (
    "99 %: the printed ratios were computed by the authors at 98.5 % (rates) and 96.5 % (scales), "
    "and where a curve is below the target from its first rate on, that rate stands for its "
    "goodput; here it counts as none. A run of 200 requests tells 99 % only to a point or two"
)
MII = (
    "DeepSpeed-MII has no published coefficients: it is chunked prefill with DistServe's raw "
    f"kernels, mixed steps {UNMEASURED_MIX:g} times the sum of their parts (as measured on another "
    "engine), and no time between steps: what such an engine could reach, not what that one does"
)

FREE_STAGES = (
    "published coefficients charge a pipeline nothing for sending from stage to stage: a stage "
    "takes its share of the step. So deep pipelines look better here than they are; they also hold "
    "more keys and values, for each device keeps fewer weights, and that is no artefact"
)
SHORT_RUNS = (
    "goodput here is of the long run. The authors searched and measured with runs of 200 to 300 "
    "requests, which end before a decode pool is full: the same placements carry more for so long "
    "(figures 8 and 9), and small decode instances look better than they are"
)

_KNEE = (
    "beyond the knee a run of a few hundred requests tells little: the standard deviation over "
    "seeds is 6 to 17 points, so that a measured point within the range is all that can be asked"
)
_VLLM_13B = (
    "vLLM, OPT-13B: 6 (simulated) to 10 % (measured) of the prompts miss 0.25 s even at the lowest "
    "rate, for they are long; goodput is where a nearly flat line crosses 90 %, so that a point "
    "of attainment moves it by a quarter of a request per second"
)
_ROOFLINE = (
    "OPT-175B: coefficients were never published. A roofline knows kernels at their best and "
    "nothing of the engines around them, so that its rates are far above those measured; it is "
    "for ranking shapes"
)
_HUMANEVAL = (
    "vLLM, HumanEval: prompts have 171 tokens, and the engine's seconds were set where they had "
    "767; charged whole, they use up much of a TTFT of 0.125 s, so that vllm-added is too slow "
    "here and the raw kernels are too fast: the measured line lies between the two"
)
_LONGBENCH = (
    "LongBench: the lengths that could be had lack the short prompts of its extended part (mean "
    "1,887 in and 88 out, the authors' 1,738 and 91), so that prompts are longer here"
)


def experiment_notes(model: str, workload: str) -> list[str]:
    """In the order in which they matter."""
    if model == "opt-175b":
        return [_ROOFLINE]
    notes = {"humaneval": [_HUMANEVAL], "longbench": [_LONGBENCH]}.get(workload, [])
    if model == "opt-13b":
        notes = [_VLLM_13B]
    return [*notes, _KNEE]
