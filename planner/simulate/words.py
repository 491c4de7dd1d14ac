"""The texts of `distserve simulate --help`."""

DESCRIPTION = """\
Predict what a deployment will do under a load: times to the first token and per output token, the
share of the requests that meet both targets, and the goodput, the highest rate at which that share
stays at the target (90 % by default). Nothing but a model's sizes and step times is needed: no
GPU, no weights, no running service.

How it works. Requests of the workload are passed through the service's own rules (dispatch,
batching, admission to KV memory, pulls) with a simulated clock. How long each step takes is
answered by the best source there is for that shape, and the report says which one it was:

  measured   a table of your own machine (--profile, made with `distserve profile`)
  fitted     a formula through a table, or published coefficients (--coefficients)
  roofline   the model's sizes against a device's rates (--device); good to about 15 %

Instances are named as for `distserve serve`: --prefill and --decode count those that do one phase
alone, --mixed those that do both; each may span several devices, its layers' matrices divided
(tp) or its layers one after the other (pp).

Without a rate the goodput is searched; with --rate one rate is looked at closely; --rates draws the
curve; --slo-scales tightens and loosens both targets at one rate. A trace (CSV) without a rate is
replayed at its own times. Every share comes with the range (95 %) in which its long-run value lies.
"""

EPILOG = """\
examples (a line that ends in \\ goes on below):
  quick start: OPT-13B on three A100s as the DistServe paper places it, chat-like load:
    distserve simulate --model opt-13b --coefficients distserve-raw --prefill 1 --prefill-tp 2 \\
      --decode 1 --workload sharegpt --ttft 250ms --tpot 100ms

  the same three devices without disaggregation, prompts in chunks beside the decodes:
    distserve simulate --model opt-13b --coefficients distserve-raw --mixed 3 --chunk-tokens 512 \\
      --ttft 250ms --tpot 100ms

  a closer look at 4 requests per second, every simulated request to a file:
    distserve simulate --model opt-13b --coefficients distserve-raw --rate 4 --ttft 250ms \\
      --save run.csv

  a model that nobody measured, on H100s, as a curve:
    distserve simulate --model llama-3.1-8b --device h100 --rates 5,10,15,20 --tpot 30ms \\
      --plot curve.svg

  your own machine and your own trace, to be laid beside a run of `distserve bench`:
    distserve simulate --model models/smollm2 --profile profile.json --kv-cache-gib 1 \\
      --workload my.csv

how to read the report:
  TTFT           from the request's arrival to its first token; TPOT: from there on, for each token
  both met       share of the requests within both targets; the 95 % range is behind it
  smallest scale by this factor both targets could be multiplied and still be met just so
  stages         where the time goes: prefill queue, prefill, transfer (the pull of keys and
                 values), decode queue (waiting for KV memory), decode
  busy, in use   share of the time a prefill instance computes; sequences decoding at once in an
                 instance, and the share of its KV memory that they fill
  floors, caps   what no schedule can beat: latencies of a request alone, rates at full batches
  limited by     the target that is missed first beyond the goodput

files:
  --profile      what `distserve profile` wrote; give several for several shapes
  --overheads    the calibration.json of `distserve bench --validate`, or any JSON with some of
                 arrival_s, handover_s, token_s, prefill_step_s, decode_step_s, decode_row_s
                 (seconds), prefill_scale and decode_scale (factors)
  --save         CSV with arrival_s,input_tokens,output_tokens and each request's times, as
                 `distserve bench` writes them; it is a workload too

exit codes: 0 predicted, 2 wrong input, 130 interrupted
"""
