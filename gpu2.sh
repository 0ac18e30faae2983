export CXX=g++ PYTHONPATH=. PYTHONWARNINGS=ignore
s=$(date +%s)
for n in expert_plan experts fp8_linear fp8_grouped_linear; do timeout 150 python3 -m pytest -q -x -m gpu -p no:cacheprovider "tests/gpu/test_contract.py::test_contract_on_cuda[$n]" > /tmp/c_$n.log 2>&1 & done
timeout 150 python3 -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_linear.py tests/gpu/test_experts.py > /tmp/c_gpu.log 2>&1 &
for l in kv q_a "shared gate_up" "shared down" q_b o_a o_b; do timeout 140 python3 -m benchmarks linear --match "$l" --out "/tmp/warm$l" > "/tmp/warm$l.log" 2>&1 & done
for l in fp4 fp8; do timeout 140 python3 -m benchmarks experts --cases $l --out "/tmp/warm$l" > "/tmp/warm$l.log" 2>&1 & done
wait; echo parallel $(( $(date +%s) - s )) s
for n in expert_plan experts fp8_linear fp8_grouped_linear gpu; do echo "== $n"; tail -25 /tmp/c_$n.log | cut -c1-300; done
for l in kv fp4; do echo "== warm $l"; tail -3 /tmp/warm$l.log | cut -c1-300; done
timeout 100 python3 -m benchmarks linear --out $OUT 2>&1 | grep -v "^ *warn"
timeout 60 python3 -m benchmarks experts --out $OUT 2>&1
echo total $(( $(date +%s) - s )) s
