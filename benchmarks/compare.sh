#!/usr/bin/env bash
# Every comparison that the documents quote, with its exact arguments. About four hours on 2 cores in all.
#
#   benchmarks/compare.sh                  # all of them
#   benchmarks/compare.sh table question2  # some
#
# Results folders go to results/compare/NAME (the same command goes on after a kill), the numbers to
# benchmarks/compare/NAME.json; `python benchmarks/pivot.py benchmarks/compare/NAME.json` prints the tables of the docs.
# GSM8K=FILE says where its test set is (JSON lines; stream and passcode read it as prose).
set -euo pipefail
cd "$(dirname "$0")/.."
KVKEEP=${KVKEEP:-.venv/bin/kvkeep}
OUT=${OUT:-results/compare}
GSM8K=${GSM8K:-../shared/data/gsm8k_test.jsonl}

models=(--model abacus-base --model abacus-attention --model abacus-kv --model abacus-kv-all)
abacus=("${models[@]}" --problems 200 --buffer 16)

run() { # NAME ARGUMENTS...
  local name=$1
  shift
  echo "== $name"
  "$KVKEEP" compare "$@" --out "$OUT/$name" --json "benchmarks/compare/$name.json"
}

policies() { for policy in "$@"; do printf -- '--policy\n%s\n' "$policy"; done; }
tasks() { for task in "$@"; do printf -- '--task\n%s\n' "$task"; done; }
primary() { for pair in "$@"; do printf -- '--primary\n%s\n' "$pair"; done; }
words() { mapfile -t "$1" < <("${@:2}"); }

# testbed.md: what each policy costs on each checkpoint.
table() {
  words p policies full random random:protect=none random:draw=layer random:draw=model recency snapkv
  words d primary 'random vs random:protect=none' 'random vs random:draw=model' 'random vs recency' 'random vs snapkv'
  run table "${abacus[@]}" --batch 200 --task abacus:n=16,mode=r2 "${p[@]}" --compression 2,4 "${d[@]}"
}

# The same where the trace restates less.
modes() {
  words p policies full random recency snapkv
  words d primary 'random vs recency' 'random vs snapkv'
  run modes "${abacus[@]}" --batch 200 --task abacus:n=16,mode=r0 --task abacus:n=16,mode=r8 "${p[@]}" --compression 2 "${d[@]}"
}

modes3x() {
  words p policies full random random:draw=model recency snapkv
  words d primary 'random vs recency' 'random vs snapkv'
  run modes3x "${abacus[@]}" --batch 200 --task abacus:n=16,mode=r0 --task abacus:n=16,mode=r8 "${p[@]}" --compression 3 "${d[@]}"
}

# A fact kept in j of 8 heads.
heads() {
  words t tasks planted:heads=0 planted:heads=1 planted:heads=2 planted:heads=3 planted:heads=4 planted:heads=6 planted:heads=8
  run heads "${abacus[@]}" "${t[@]}" --policy random --compression 2
}

# The full cache at other lengths and modes (n=16 is in table and modes).
accuracy() {
  words t tasks abacus:n=8,mode=r0 abacus:n=8,mode=r2 abacus:n=24,mode=r0 abacus:n=24,mode=r2
  run accuracy "${models[@]}" --problems 200 --batch 200 "${t[@]}" --policy full
}

question1() {
  words p policies full random snapkv random:protect=none snapkv:protect=none random:protect=prompt:0.5 snapkv:protect=prompt:0.5
  words d primary 'snapkv vs random' 'snapkv:protect=prompt:0.5 vs random:protect=prompt:0.5' 'snapkv:protect=none vs random:protect=none'
  run question1 "${abacus[@]}" --batch 200 --task abacus:n=12,mode=r2 "${p[@]}" --compression 2 "${d[@]}"
}

question2() {
  words p policies full random snapkv recency
  words t tasks abacus:n=8,mode=r0 planted:heads=natural planted:heads=natural,line=2
  words d primary 'snapkv vs random' 'recency vs random'
  run question2 "${abacus[@]}" "${t[@]}" "${p[@]}" --compression 2 "${d[@]}"
}

question3() {
  words p policies full random random:groups=4 random:groups=2 random:groups=1
  words d primary 'random vs random:groups=4' 'random vs random:groups=2' 'random vs random:groups=1'
  run question3 "${abacus[@]}" --batch 200 --task abacus:n=12,mode=r2 "${p[@]}" --compression 3 "${d[@]}"
}

# A real language model, forced: KL and perplexity on streams of GSM8K solutions. Every arm runs beside the full cache.
stream() {
  words p policies random recency
  run stream --model smollm2 --task "stream:skip=576,path=$GSM8K" "${p[@]}" --budget 256,512 --buffer 64 \
    --problems 20 --batch 2 --check 2 --primary 'random vs recency'
}

# And a number said once in its trace.
passcode() {
  words p policies full random
  words t tasks {"passcode:tokens=1000","passcode:tokens=3000","passcode:tokens=6000"},where=trace,"path=$GSM8K"
  run passcode --model smollm2 "${t[@]}" "${p[@]}" --budget 512 --buffer 64 --problems 8 --batch 1
}

# Every method, with the prompt protected and without: what is left of their differences?
methods=(random recency h2o tova snapkv pyramidkv expected rkv vase vase-dkv triattention rpc infokv beaconkv knorm keydiff lagkv:lag=16)
controls=(--model abacus-base --model abacus-attention --buffer 16)
protection() {
  local p=(--policy full) method
  for method in "${methods[@]}"; do
    [[ $method == *:* ]] && p+=(--policy "$method" --policy "$method,protect=none") || p+=(--policy "$method" --policy "$method:protect=none")
  done
  run protection "${controls[@]}" --problems 100 --batch 100 --task abacus:n=12,mode=r2 --compression 2 "${p[@]}"
}

# A passcode said once and asked for later: on the testbed, every method ...
once() {
  words p policies full "${methods[@]}"
  run once "${controls[@]}" --problems 200 --task planted:heads=natural --compression 2 "${p[@]}"
}

# ... and on a language model.
once-smollm2() {
  words p policies full "${methods[@]}"
  run once-smollm2 --model smollm2 --task "passcode:tokens=1000,where=trace,path=$GSM8K" "${p[@]}" --budget 512 --buffer 64 \
    --problems 8 --batch 1
}

# Half of the budget to random, half to beacons, or to the newest queries without beacons.
question4() {
  words p policies full random mix:second=beaconkv,label=random+beacons mix:second=beaconkv+beacons=0,label=random+recent beaconkv
  words t tasks abacus:n=8,mode=r0 planted:heads=natural planted:heads=natural,line=2
  words d primary 'random+beacons vs random' 'random+beacons vs random+recent'
  run question4 "${abacus[@]}" "${t[@]}" "${p[@]}" --compression 2 "${d[@]}"
}

all=(table modes modes3x heads accuracy question1 question2 question3 question4 protection once once-smollm2 stream passcode)
mkdir -p benchmarks/compare
for name in "${@:-${all[@]}}"; do
  [[ " ${all[*]} " == *" $name "* ]] || { echo "unknown comparison $name: known are ${all[*]}" >&2; exit 2; }
  "$name"
done
