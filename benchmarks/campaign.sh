#!/usr/bin/env bash
# The measurements of one evening on a GPU, in parts that each end within ten minutes: bash benchmarks/campaign.sh PART [DATA]
# from the root of the repository. DATA: folder with traces/ and benchmarks/. Results go to $OUT, packed into one file for each part.
#   tests         everything in tests/gpu, steps with prompts first; alone: those that want the GPU for themselves
#   mixed         steps with prompts, captured and launched one by one
#   conversation  capacity under the SLO, Azure's conversation window, at 21 GiB
#   code          the same, code window
#   lengths       the map of nine skipping arms, lengths of GSM8K; bbh: one cell of it and BBH lengths
#   both          elastic and auto depth together against each alone
#   soak          five minutes of bursts, aborts and failures
#   train         a training step beside LoRA's (DEPTHFX_SMOLLM2 names the model, DATA a folder of held-out texts), then flips in FP16
# To try a part on a CPU: TINY=1. CAPTURE= (empty) leaves steps with prompts eager.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
part=${1:?which part: see the head of this file} data=${2:-}
out=${OUT:-build/campaign}; export OUT=$out/$part PYTHONPATH=. PYTHONUNBUFFERED=1
mkdir -p "$OUT"
trap 'tar -C "$out" -czf "$out/$part.tgz" "$part"' EXIT
capture=${CAPTURE---capture-prompts} seed=${SEED:-0} limit=${LIMIT:-540}
model=(--shape llama3-8b --chunk-tokens 768 --budget-gib "${BUDGET:-21}") requests=${REQUESTS:-500}
small=()
base=(${TBASE:+--t-base-ms "$TBASE"})
if [ -n "${TINY:-}" ]; then
  capture= requests=10
  model=(--shape smollm2 --layers 4 --kv-blocks 60 --max-batch 8 --max-len 256 --no-inductor --chunk-tokens 64 --unit-mib 0.5 --max-input 60 --max-output 12)
  base=(--base-batch 2 --base-context 24 --base-steps 6)
fi
# PYTHON runs a script of benchmarks/ for at most $limit seconds; what it has by then is kept.
bench() { timeout --signal=TERM "$limit" "${PYTHON:-python3}" "benchmarks/$1.py" "${@:2}" 2>&1 | tee -a "$OUT/log" || true; }
load=("${model[@]}" ${capture:+"$capture"} --arrivals gamma --cv 2 --resolution 0.06 --seed "$seed" --warm-up "${WARM_UP:-150}" --requests "$requests" "${base[@]}")

case $part in
tests)
  RACE_SECONDS=${RACE_SECONDS:-240} "${PYTHON:-python3}" -m pytest tests/gpu/test_mixed_steps.py -q -x 2>&1 | tee "$OUT/mixed" || true
  "${PYTHON:-python3}" -m pytest tests/gpu -m "not alone" -n 14 --dist loadgroup -q 2>&1 | tee "$OUT/shared" || true
  "${PYTHON:-python3}" -m pytest tests/gpu -m alone -q 2>&1 | tee "$OUT/alone" ;;
mixed)
  if [ -n "${TINY:-}" ]; then small=(--shape smollm2 --arms nested --layers 1 --no-inductor --decodes 4 --rows 40 --context 64 --kv-blocks 200 --repeats 1 --chunk-tokens 128); fi
  bench mixed "${small[@]}" ;;
conversation)
  bench load "${load[@]}" --lengths "$data/traces/azure_llm_2023_conv_2000.csv" --arms static-fp16 elastic static-fp8 \
    --guesses ${GUESSES:-21 43 47} --own-shares 0.5 --base-shares 1.3 --name conversation ;;
code)
  bench load "${load[@]}" --lengths "$data/traces/azure_llm_2023_code_2000.csv" --arms static-fp16 elastic static-fp8 \
    --guesses ${GUESSES:-8 16 18} --own-shares 0.5 --base-shares 1.3 --name code ;;
lengths | bbh)
  gsm=(--lengths "$data/benchmarks/gsm8k/test.jsonl" --examples "$data/benchmarks/gsm8k/fewshot8.jsonl")
  bbh=(--lengths "$data/benchmarks/bbh/tasks" --examples "$data/benchmarks/bbh/cot-prompts")
  map=("${model[@]}" --limit "$limit" --of-saturation 0.95 1.25 --seed "$seed" --requests "${MAP_REQUESTS:-100}")
  if [ -n "${TINY:-}" ]; then map=(--shape smollm2 --layers 4 --kv-blocks 400 --max-batch 8 --no-inductor --max-output 6 --max-input 700 --limit "$limit" --of-saturation 0.95 --requests 6 --skip-rates 0.5 --skip-depths 0.5); fi
  if [ "$part" = lengths ]; then bench skip_map "${map[@]}" "${gsm[@]}" --name gsm8k; else bench skip_map "${map[@]}" "${bbh[@]}" --skip-rates 0.5 --skip-depths 0.5 --name bbh; fi ;;
both)
  bench load "${load[@]}" --lengths "$data/traces/azure_llm_2023_conv_2000.csv" --arms elastic auto elastic+auto \
    --guesses ${GUESSES:-43 21 45} --skip-rate 0.5 --skip-depth 0.5 --name both ;;
soak)
  if [ -n "${TINY:-}" ]; then bench soak --minutes 0.1 --shape smollm2 --layers 2; else bench soak --minutes 5 --shape small; fi ;;
train)
  if [ -n "${TINY:-}" ]; then bench train_step --rounds 1 --batch 2 --length 48 --dtype float32; else bench train_step; fi
  "${PYTHON:-python3}" -m depthfx skipper check depthfx/data/smollm2_skipper smollm2 --tokens "${TOKENS:-10000}" ${data:+--text "$data"/*} --json "$OUT/check.json" ;;
*) echo "no part $part: see the head of this file" >&2; exit 2 ;;
esac
