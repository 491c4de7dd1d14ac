"""The texts of `distserve plan --help`."""

DESCRIPTION = """\
Find out how to place a model on your devices: which instances prefill, which decode, how many of
each and cut how (tp: matrices divided; pp: layers one after the other), so that each device serves
as many requests per second as it can while the target share of them (90 %) meets both the time to
the first token and the time per output token. If placing both phases together is better, it says
so, and why.

How it works. Every shape that fits the devices' memory is a candidate. What latencies alone rule
out is dropped with its reason; the rest is simulated with the service's own rules on the same
requests, and its goodput searched, with the range (95 %) in which it lies. Of placements that
cannot be told apart the one with fewer devices is taken. Then come the baselines, searched the
same way: both phases on the same devices with prompts first, and with prompts in chunks.

Where keys and values may travel:

  low     within a node only (the paper's Algorithm 2): the same pipeline segment of prefill and
          decode is on one node. What `distserve serve` can run.
  high    over fast links anywhere (Algorithm 1): each phase's best shape by itself, as many of
          each as the rate needs. Where that takes keys and values across nodes it is marked as
          not servable yet.
  both    the better of the two

What is best (--objective):

  goodput     requests per second and device within the targets
  devices     fewest devices that carry --rate within the targets
  throughput  requests per second and device, whatever they wait

The model, its step times, the load and the targets are given in the words of `distserve simulate`.
"""

EPILOG = """\
examples:
  quick start: OPT-13B for a chat-like load on one node of eight A100s:
    distserve plan --model opt-13b --coefficients distserve-raw \\
      --workload sharegpt --ttft 250ms --tpot 100ms

  fewest devices for 10 requests per second on two named nodes, to a file, with what it costs:
    distserve plan --model opt-13b --coefficients distserve-raw --nodes alpha,beta \\
      --objective devices --rate 10 --ttft 250ms --device-hour-price 2.5 --out placement.json

  a model that nobody measured, on four nodes of H100s, keys and values over any link, with figures:
    distserve plan --model llama-3.1-70b --device h100 --nodes 4 --affinity high \\
      --ttft 500ms --tpot 40ms --plot figures/

  how many prefill and decode instances of shapes that are settled already:
    distserve plan --model opt-66b --coefficients distserve-raw --prefill-tp 4 \\
      --decode-tp 2 --decode-pp 2 --nodes 4 --ttft 2.5s --tpot 150ms

  does the placement in use still suit what came in since:
    distserve plan --model opt-13b --coefficients distserve-raw --ttft 250ms \\
      --replan log.csv --current placement.json

how to read the report:
  per device     goodput over devices; in brackets the range in which it lies
  tie            cannot be told from the best: it lies within the best one's range
  gain           the best disaggregated placement's goodput per device over a baseline's
  sensitivity    the recommendation under another load than you gave: does it still hold?
  dropped        not simulated, since latencies or memory alone rule them out; --all lists each

files:
  --out          JSON: instances with role, tp, pp, and each stage's node and devices, and where it
                 all comes from (load, targets, prediction); `distserve serve` reads it
  --replan       CSV with arrival_s,input_tokens,output_tokens

exit codes: 0 planned, 2 wrong input or nothing to recommend, 130 interrupted
"""
