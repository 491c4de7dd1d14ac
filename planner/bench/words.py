"""The texts of `distserve bench --help`."""

DESCRIPTION = """\
Replay a workload against any OpenAI-compatible service (this one, vLLM, SGLang, ...) and tell
how it did: TTFT, TPOT and inter-token latency, the five stages where the service tells them, and
which share of the requests met both targets, with 95 % intervals. With several rates, or a sweep,
also the goodput: the highest rate at which that share stays at the target.

Requests are sent at their times however late the answers to others are, and TTFT counts from the
scheduled time. A request that fails counts as one that missed both targets.

With --simulate the same requests also pass through the simulator, and both are set side by side.
With --validate it is put to the test: one live run calibrates it (how much longer steps and
hand-overs take in service than in the profile), then other runs, which it has not seen, show how
far its predictions can be trusted.
"""

EPILOG = """\
examples (a line that ends in \\ goes on below):
  one run: 200 chat-like requests, two each second, at most 2 s to the first token and then
  100 ms for each:
    distserve bench http://127.0.0.1:8000 --workload sharegpt --rate 2 --ttft 2s --tpot 100ms

  the curve of attainment over the rate, and the goodput:
    distserve bench http://127.0.0.1:8000 --rates 1,2,3,4 --ttft 2s --tpot 100ms --plot curve.svg

  let it find the knee by itself, beginning at 1 request per second:
    distserve bench http://127.0.0.1:8000 --sweep --rate 1 --ttft 2s --tpot 100ms

  a trace of your own (a CSV with arrival_s,input_tokens,output_tokens) at its own times:
    distserve bench http://127.0.0.1:8000 --workload my.csv --num-requests 500

  a service that takes no token ids, and wants a key:
    distserve bench https://api.example.com --prompt text --api-key-env MY_KEY --model some-model

  what the simulator says of the same requests, on your profile of the model that runs there:
    distserve bench http://127.0.0.1:8000 --rates 1,2 --ttft 2s \\
      --simulate "--model models/smollm2 --profile profile.json --kv-cache-gib 1"

  can the simulator be trusted? Calibrate on chats at 1/s, test on chats and on summaries, each
  trace twice, for a live run does not repeat itself either; and where is the knee?
    distserve bench http://127.0.0.1:8000 --validate --calibrate-rate 1 --rates 1.5,2 --repeat 2 \\
      --test-workload sharegpt --test-workload longbench --num-requests 500 --ttft 2s --knee \\
      --simulate "--model models/smollm2 --profile profile.json --kv-cache-gib 1"

  ... and from then on plan with what it found:
    distserve simulate --model models/smollm2 --profile profile.json --kv-cache-gib 1 \\
      --overheads distserve-bench/calibration.json

how to read the comparison:
  error          the simulation's: above zero where it promises more attainment, or longer times,
                 than there were; of the attainment in points, of latencies relative
  95 %           of the difference in attainment, paired by request: arrivals and lengths cancel
  stages         where an error comes from, if the service tells its stages
  agrees         attainment within 2 points (or within the difference between two replays of the
                 same requests, with --repeat), P50 and P90 of TTFT and TPOT within 10 %

exit codes: 0 measured, whether the simulator agrees or not; 1 the service failed; 2 wrong input
"""
