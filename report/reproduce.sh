#!/usr/bin/env bash
# Runs again what the report shows, as far as two CPU cores can in under four hours:
#
#   report/reproduce.sh           all of it, into runs/report (or $OUT)
#   report/reproduce.sh --quick   every command at a tiny size: does it still run?
#   report/reproduce.sh --gpu     only prints the commands that need a GPU, with the hours that the planner estimates
#
# The number before a command is its time in minutes on 2 cores of an AMD EPYC, recorded or estimated from stored speeds; with what runs side by
# side they add up to 233. A command that fails does not stop the others; the exit status is then 1. What needs public data (recall on HotpotQA
# and 2Wiki, SmolLM2, dense retrieval) or a program that is gone is not here: its entry in docs/measurements has the command and the commit.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
OUT=${OUT:-runs/report}
PYTHON=${PYTHON:-python}
export OMP_NUM_THREADS=1
quick=false gpu=false failed=0
for word in "$@"; do
    case $word in
        --quick) quick=true ;;
        --gpu) gpu=true ;;
        *) echo "$word is neither --quick nor --gpu" >&2; exit 2 ;;
    esac
done

pick() { if $quick; then echo "$2"; else echo "$1"; fi; } # pick FULL TINY

run() { # run MINUTES COMMAND...
    local minutes=$1 start=$SECONDS
    shift
    printf '\n== %s (expected: %s min)\n' "$*" "$minutes"
    "$@" || { echo "== failed: exit status $?" >&2; failed=1; }
    echo "== $((SECONDS - start)) s"
}

plan() { # plan MACHINE COMMAND...: the command, and its hours there by the planner
    local machine=$1 found
    shift
    found=$("$@" --plan "plan.machine=$machine" plan.devices=1 2> /dev/null | awk -v m="$machine" '$1 == m {print $5, $6}')
    printf '%s\n    %s on one %s\n' "$*" "${found:-no plan}" "$machine"
}

print_gpu_part() {
    printf '\n== What needs a GPU, with the hours that the planner estimates\n'
    plan h200 "$PYTHON" train.py --config gb300_rl.yaml train.lora_rank=64 plan.machine=h200
    plan gb300 "$PYTHON" train.py --config gb300.yaml
    plan gb300 "$PYTHON" train.py --config gb300_rl.yaml
    cat << 'END'
python -m pytest -m gpu
    at most 5 minutes
python profiling/gpu_proof.py --out runs/gpu
    at most 12 minutes
python evaluate.py --config sardi.yaml --dataset 2wiki --out runs/2wiki --compare interleaved,interleaved+decode.commit_threshold=0.95,static
    the paper's own table, never run here; first dlm-rag data get 2wiki --split sardi
END
}

if $gpu; then
    print_gpu_part
    exit 0
fi

world=dlm_rag/shipped/world
ask="decode.batch_size=16 limit=$(pick 400 4)"
some="decode.batch_size=16 limit=$(pick 200 4)"
files="--corpus $world/corpus.jsonl --questions $world/questions.jsonl"

# 4. The gradient through retrieval (table 4, figure 4): three seeds of the denoiser, the toy of four gradients; beside 1 and 2,
# since neither uses both cores
reward_part() {
    reward="train.py --config search_rl.yaml"
    tiny=$(pick "" "train.max_steps=1 train.prompts_per_step=2 train.num_generations=2 train.world_passages=300 train.eval_questions=1")
    for seed in 0 1 2; do
        $quick && [ $seed != 0 ] && continue
        run 26 $PYTHON $reward train.seed=$seed out="$OUT/denoiser$seed" $tiny
    done
    for world in 31 32; do
        $quick && [ $world != 31 ] && continue
        run 1 $PYTHON -m dlm_rag.data.synthetic_world --seed $world --per-hop "$(pick 250 2)" --out "$OUT/w$world"
        for hops in 3 4; do
            grep "\"hops\": $hops" "$OUT/w$world/questions.jsonl" | grep 'path": false.*wording": false' | head -100
        done > "$OUT/q$world.jsonl"
        policies=interleaved,interleaved+decode.block_length=0
        for seed in 0 1 2; do
            $quick && [ $seed != 0 ] && continue
            policies+=,interleaved+decode.block_length=0+model.path=$OUT/denoiser$seed/model
        done
        run 5 $PYTHON evaluate.py --model dlm_rag/shipped/whole --corpus "$OUT/w$world/corpus.jsonl" --questions "$OUT/q$world.jsonl" \
            --out "$OUT/policies$world" decode.batch_size=32 --compare "$policies"
    done
    $quick || run 10 $PYTHON report/shortcuts.py
    return $failed
}
mkdir -p "$OUT"
set -m # a process group of its own, which ends with this script
reward_part > "$OUT/reward.txt" 2>&1 &
reward_job=$!
set +m
trap 'kill -- "-$reward_job" 2> /dev/null' EXIT

# 1. Proofs by test (table 1), without the reference data of the golden traces
$quick || run 9 $PYTHON -m pytest -p no:cacheprovider -q tests/evidence tests/decode/test_exactness.py \
    tests/decode/test_engine.py tests/model/test_block_attention.py tests/model/test_kv_format.py tests/training/test_policy.py

# 2. Retrieval inside denoising (tables 2 and 3, figure 2)
run 5 $PYTHON evaluate.py --out "$OUT/shipped" --compare all $ask
run 9 $PYTHON evaluate.py --out "$OUT/thresholds" --sweep "decode.commit_threshold=$(pick 0.9,0.7,0.8,0.95 0.9,0.7)" \
    "decode.query_threshold=$(pick 0,0.5,1 0,1)" $some
run 3 $PYTHON evaluate.py --out "$OUT/passages" --sweep "retrieval.top_k=$(pick 7,1,3,5 7,1)" $some
run 3 $PYTHON evaluate.py --out "$OUT/schedule" --sweep "decode.retrieval_interval=$(pick 1,2,4,8 1,8)" $some
run 2 $PYTHON evaluate.py --out "$OUT/whole" --compare interleaved,interleaved+model.path=dlm_rag/shipped/whole $files $ask
for seed in 8 9; do
    $quick && [ $seed != 8 ] && continue
    run 1 $PYTHON -m dlm_rag.data.synthetic_world --seed $seed --out "$OUT/world$seed" --per-hop "$(pick 100 1)"
    run 2 $PYTHON evaluate.py --out "$OUT/other$seed" --corpus "$OUT/world$seed/corpus.jsonl" \
        --questions "$OUT/world$seed/questions.jsonl" --compare interleaved,static,oracle $ask
done

wait "$reward_job" || failed=1
cat "$OUT/reward.txt"

# 3. Caching, blocks at once (tables 5 and 6, figures 5 and 6)
run 15 $PYTHON profiling/bench_decode.py --out "$OUT/decode" --limit "$(pick 300 2)" --rounds "$(pick 3 1)" decode.batch_size=16 \
    --model dlm_rag/shipped/whole $files
run 8 $PYTHON profiling/bench_decode.py --out "$OUT/stored" --limit "$(pick 300 2)" --rounds "$(pick 3 1)" decode.batch_size=16
$quick || run 15 $PYTHON profiling/bench_decode.py --out "$OUT/shape" --shape 100m --limit 4 --rounds 3 --before 100 \
    decode.batch_size=4 engine.prefix_cache_gib=8
run 2 $PYTHON evaluate.py --out "$OUT/at_once" --sweep "decode.blocks_at_once=$(pick 1,2,3,4,12 1,12)" $files $some
run 2 $PYTHON evaluate.py --out "$OUT/opened" --sweep "decode.blocks_at_once=$(pick 2,3,4,12 2,12)" decode.block_add_threshold=0 $files $some

# 5. Training from scratch, three seeds, blocks or a whole canvas (table 5); retrieval with the first three (section 3)
run 1 $PYTHON -m dlm_rag.data.synthetic_world --seed 5 --passages 300 --hops 2 --per-hop "$(pick 200 2)" --out "$OUT/tiny_world"
for seed in 0 1 2; do
    $quick && [ $seed != 0 ] && continue
    run 14 $PYTHON -m torch.distributed.run --nproc-per-node 2 train.py --config tiny.yaml train.seed=$seed out="$OUT/tiny$seed" \
        $(pick "" "train.max_steps=2 train.eval_steps=2 train.eval_questions=1")
    run 2 $PYTHON evaluate.py --out "$OUT/seed$seed" --model "$OUT/tiny$seed/model" --corpus "$OUT/tiny_world/corpus.jsonl" \
        --questions "$OUT/tiny_world/questions.jsonl" --compare interleaved,committed,static,two_rounds,oracle retrieval.top_k=4 $ask
    run 14 $PYTHON -m torch.distributed.run --nproc-per-node 2 train.py --config tiny.yaml train.seed=$seed out="$OUT/blocks$seed" \
        model.block_size=8 decode.finished_block_context=no_evidence $(pick "" "train.max_steps=2 train.eval_steps=2 train.eval_questions=1")
done
$quick || print_gpu_part
exit $failed
