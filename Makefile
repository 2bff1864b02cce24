# Every target sets up what it needs: a fresh machine has only Python (3.10 or later) and pip.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
# Seconds that one test run and one gate may take before it is stopped.
LIMIT ?= 2700
# The word by which tests on real processes are drawn.
DRAWN ?= first
# The folder of published measurements, gzipped CSV files, and what `make accuracy` finds.
PUBLISHED ?= published
ACCURACY := runs/accuracy
SEARCH := runs/search

export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED := 1
# Tests start many processes: none shall compile all modules anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo examples test thorough chaos quick gates check docs bench recipes real-sizes accuracy search-bench scores matrix wheels oldest golden clean

demo: $(READY)
	env -u OMP_NUM_THREADS $(BIN)/weft run -n 2 examples/gpt.py

# Every example in both of its strategies, and the notebooks: some minutes.
examples: $(READY)
	$(BIN)/python examples/run_all.py --reports runs/gallery

# A tenth of those of `tests/program` also on real processes, drawn by $(DRAWN): `make test DRAWN=another` takes others.
test: $(READY)
	timeout $(LIMIT) $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --processes $(DRAWN)

# All cases of every test, and all of `tests/program` also on real processes: an hour and a half.
thorough: $(READY)
	timeout $$((3 * $(LIMIT))) $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --thorough --processes all

quick: $(READY)
	timeout $(LIMIT) $(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not slow" @tests/quick.txt

gates: $(READY)
	timeout $(LIMIT) $(BIN)/python -m tools.gates

check: gates test

# The documentation as a site, build/site/index.html; a warning is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 timeout $(LIMIT) $(BIN)/python -m mkdocs build --strict

bench: $(READY)
	$(BIN)/python -m benchmarks

# Schedulers, launchers and other libraries, as far as this machine has them: a quarter of an hour.
recipes: $(READY)
	$(BIN)/python -m recipes

real-sizes: $(READY)
	$(BIN)/python -m tools.real_sizes --page docs/real_sizes.md

accuracy: $(READY)
	mkdir -p $(ACCURACY)
	$(BIN)/python -m benchmarks.accuracy --sample 12 --json $(ACCURACY)/published.json --published $(wildcard $(PUBLISHED)/*.csv.gz)
	$(BIN)/python -m benchmarks.accuracy_collectives --json $(ACCURACY)/collectives.json $(wildcard $(PUBLISHED)/*allreduce.csv.gz)
	$(BIN)/python -m benchmarks.accuracy_here --json $(ACCURACY)/here.json
	$(BIN)/python -m benchmarks.planning

search-bench: $(READY)
	mkdir -p $(SEARCH)
	$(BIN)/python -m benchmarks.search_bench --json $(SEARCH)/found.json

# All pages of scores anew: hours, most of them bench and search-bench, on an idle machine. The last two print what is
# written into their pages by hand; `python -m tools.scores --help` says how these are told that it was.
scores: $(READY) bench real-sizes accuracy search-bench
	$(BIN)/python -m benchmarks.page
	$(BIN)/python -m tools.opinfo --jobs 2
	$(BIN)/python -m tools.opinfo --jobs 2 --eager
	$(BIN)/python -m tools.models
	$(BIN)/python -m tools.combinations
	$(BIN)/python -m tools.random_programs --count 200 --seed $$(date +%s)

# The tests on each Python that is there and on the oldest and the newest torch: hours.
matrix: $(READY)
	$(BIN)/python -m tools.matrix

# The wheel in fresh environments of the same: minutes.
wheels: $(READY)
	$(BIN)/python -m tools.wheels

# A few minutes of them on the oldest torch, where pip finds it for CPUs.
oldest: $(READY)
	$(BIN)/python -m tools.matrix --python $$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])') \
		--torch oldest --tests tests/torch_private tests/capture tests/opinfo/test_opinfo.py tests/runtime/kernels

# Two hundred faults in real runs: an hour.
chaos: $(READY)
	$(BIN)/python -m benchmarks.chaos --faults 200

golden: $(READY)
	$(BIN)/python -m pytest --update-golden

clean:
	rm -rf .venv build dist runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,models,docs]'
	touch $(READY)
