#!/usr/bin/env python3
"""Breaks the source in one place after the other and shows that a test fails each time.

usage: mutations.py [--list] [--part I/N] [NAME...]

All, or those whose name has one of the words; of these the I-th of N parts, so that as many copies of
the project share the work, each with its tree.

Each mutation is made in a copy of the tracked files (build/mutations/tree), never here; its tests are
built and run there. Exit code 1 if a mutation survives, or if a test fails before anything is broken.
Not part of CI: about half a minute each on two cores. docs/testing.md has the table."""

import argparse
import filecmp
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TREE = os.path.join(ROOT, "build", "mutations", "tree")
BUILD = os.path.join(TREE, "build", "release")

# name, file, what stands there (once), what stands there instead, test program, its --gtest_filter
MUTATIONS = [
    # The checks of `verify`.
    ("verify: outputs unchecked", "verify/check_layer.cpp",
     "if (wrong.empty()) wrong = check_outputs(result);", "",
     "checkers_test", "Checkers.AnOutput*"),
    ("verify: ranks unchecked", "verify/check_layer.cpp",
     "wrong = check_rank(rank, result.ranks[static_cast<std::size_t>(rank)]);", "",
     "checkers_test", "Checkers.*"),
    ("verify: choice unchecked", "verify/check_layer.cpp",
     "std::string wrong = reference::check_choice(config, scores, ties, chosen);",
     "std::string wrong;", "checkers_test", "Checkers.AWrongChoice*"),
    ("verify: rows unchecked", "verify/check_layer.cpp",
     "wrong = check_rows(result);", "", "checkers_test", "Checkers.WrongCounts*"),
    ("verify: traffic unchecked", "verify/check_layer.cpp",
     "wrong = check_traffic(result);", "wrong = \"\";", "checkers_test", "Checkers.WrongCounts*"),
    ("verify: second run unchecked", "verify/check_layer.cpp",
     "if (wrong.empty() && second) wrong = check_again(result, *second);", "",
     "checkers_test", "Checkers.ASecondRun*"),
    ("verify: stages unchecked", "verify/verify.cpp",
     "wrong = check_stages(same ? problem : make_problem(top_k), options.stages);", "",
     "checkers_test", "Checkers.VerifyFailsWhenAStage*"),
    ("verify: a miss exits 0", "verify/verify.cpp",
     "  return miss ? 1 : 0;\n}\n\n}  // namespace", "  return 0;\n}\n\n}  // namespace",
     "checkers_test", "Checkers.Verify*"),
    ("verify: a tie of a zero token is free", "reference/router_check.cpp",
     "return exact ? tie_classes(logits, selection_bias)",
     "return false ? tie_classes(logits, selection_bias)", "checkers_test", "Checkers.ATie*"),
    ("verify: a soak unchecked", "verify/soak.cpp",
     "    return compare(config);", "    return {};", "checkers_test", "Checkers.ASoak*"),
    # The bounds.
    ("bounds: NaN is admitted", "reference/bounded.hpp",
     "return low <= computed && computed <= high;", "return !(computed < low || computed > high);",
     "reference_numbers_test", "*"),
    ("bounds: an overflow admits all", "reference/bounded.hpp",
     "if (number.overflows()) return !std::isfinite(computed);",
     "if (number.overflows()) return true;", "reference_numbers_test", "*"),
    ("bounds: a GPU's output unchecked", "testkit/gpu/expect_output.hpp",
     "return reference::check_output(expected, model.config.experts.hidden, DType::kF32, out);",
     "(void)expected, (void)out;\n  return {};", "checkers_test", "Checkers.TheBounds*"),
    ("bounds: sums over tokens unchecked", "testkit/gpu/expect_gradients.hpp",
     "if (apart <= share * magnitudes[i]) continue;",
     "if (apart <= share * magnitudes[i] || share > 0) continue;", "verify_backward_test",
     "VerifyBackward.TheBounds*"),
    # `run --check`.
    ("run --check: outputs unchecked", "tool/run/check.cpp",
     "if (verdict_.holds) check_outputs();", "", "run_check_test", "*"),
    ("run --check: NaN is no error", "tool/run/check.cpp",
     "const double known = std::isnan(error) ? HUGE_VAL : error;", "const double known = error;",
     "run_check_test", "*"),
    ("run --check: drops unchecked", "tool/run/check.cpp",
     "if (!wrong.empty()) miss(fmt::format(\"drops of rank {}: {}\", rank, wrong));", "",
     "run_check_test", "*"),
    ("run --check: a miss exits 0", "tool/run/run.cpp",
     "return wrong ? kCheckFailed : kFine;", "return kFine;", "run_check_test", "*"),
    ("run --check: a wrong result is written", "tool/run/run.cpp",
     "if (!wrong) {", "if (true) {", "run_check_test", "*"),
    ("run --check: NaN weights are let in", "tool/run/run.cpp",
     "if (options.check) check_weights(", "if (false) check_weights(", "run_check_test", "*"),
    # Routing.
    ("route: infinities of a group unguarded", "src/route/cpu/route.cpp",
     "return second == kNone ? kNone : first + second;", "return first + second;",
     "route_test", "Route.*"),
    ("route: the last NaN is named", "src/route/cpu/tokens.hpp",
     "while (place < seen && !lowest_", "while (!lowest_", "route_test", "Route.*"),
    ("route: a tie goes to the higher expert", "src/route/cpu/route.cpp",
     "for (; i > 0 && key > key_[index(i - 1)]; --i) {",
     "for (; i > 0 && key >= key_[index(i - 1)]; --i) {", "golden_test", "Golden.*"),
    # The way back.
    ("backward: gradients unchecked", "verify/check_backward.cpp",
     ": check_gradients(problem, backward, result, how.backend);", ": std::string();",
     "verify_backward_test", "VerifyBackward.A*"),
    ("backward: second run unchecked", "verify/check_backward.cpp",
     "if (result.gradients[i].bytes == second.gradients[i].bytes) continue;", "continue;",
     "verify_backward_test", "VerifyBackward.OtherBits*"),
    ("backward: a sigmoid without a slope in the reference", "reference/router_backward.cpp",
     "slope = multiply(slope, add({1.0, 0}, {-s.value, s.error}));", "",
     "reference_backward_test", "ReferenceBackward.EveryRule*"),
    ("backward: a clamp that passes beyond its end in the reference",
     "reference/expert_backward.cpp",
     "return multiply(passes_clamp(gate, -HUGE_VAL, limit), silu_slope(clamped, config.alpha));",
     "return silu_slope(clamped, config.alpha);",
     "reference_backward_test", "ReferenceBackward.EveryActivation*"),
    ("backward: shares that do not share", "src/route/cpu/backward.cpp",
     "share_[k] * slope * (gradient_[k] - mean);", "share_[k] * slope * gradient_[k];",
     "route_backward_test", "RouteBackward.*"),
    ("backward: a row's weight is left out", "src/experts/cpu/product/gradients.hpp",
     "const Reg gradient = V::mul(weight, dinner);", "const Reg gradient = dinner;",
     "experts_backward_test", "*EveryActivation*"),
    ("backward: what was dropped keeps a gradient", "src/layer/choice_gradients.cpp",
     "      gradient = 0.0F;\n", "",
     "verify_backward_test", "VerifyBackward.AThousand*"),
    ("backward: counts of ranks lose their high halves", "src/layer/cpu/backward.cpp",
     "joined_count(parts[i], parts[i + 1])", "joined_count(parts[i], 0)",
     "layer_losses_test", "LayerLosses.CountsOverRanks*"),
    ("layer: losses of a chain are its last iteration's", "src/layer/chain.cpp",
     ".first = c == 0", ".first = true", "chain_test", "Chain.Losses*"),
    ("experts: tiles take the codes of another step", "src/experts/cpu/product/coded_tiles.hpp",
     "const std::byte* made = made_[0][step % 2];", "const std::byte* made = made_[0][0];",
     "stored_codes_test", "*TimesFewRows*"),
    ("layer: statistics of a routing that is gone", "src/layer/cpu/router.cpp",
     "  own_ = {};\n", "", "layer_stats_test", "LayerStats.AreAnError*"),
    ("backward: auxiliary losses are left out", "src/layer/cpu/backward.cpp",
     ".accumulate = args.dlogits.data != nullptr,", ".accumulate = false,",
     "verify_backward_test", "VerifyBackward.AThousand*"),
    ("backward: a saved forward is used twice", "src/layer/cpu/layer.cpp",
     "    saved.use = SavedForward::State::Use::kUsed;\n", "",
     "layer_backward_test", "LayerBackward.ASavedForward*"),
    ("backward: another layer's saved forward is taken", "src/layer/saved_forward.cpp",
     "require(layer == number,", "require(number > 0,",
     "layer_backward_test", "LayerBackward.ASavedForward*"),
    ("backward: reloaded experts go unseen", "src/layer/saved_forward.cpp",
     "require(reloads == of_layer,", "require(of_layer >= 0,",
     "layer_backward_test", "LayerBackward.ASavedForward*"),
    # What another rank sends.
    ("exchange: epoch unchecked", "src/comm/host/exchange.cpp",
     "if (words.front() != epoch) {", "if (false) {",
     "exchange_message_test", "*"),
    ("exchange: a negative count", "src/comm/host/exchange.cpp",
     "if (count < 0 || count > limit) {", "if (count > limit) {", "exchange_message_test", "*"),
    ("exchange: a count too large", "src/comm/host/exchange.cpp",
     "if (count < 0 || count > limit) {", "if (count < 0) {", "exchange_message_test", "*"),
    ("exchange: ids unchecked", "src/comm/host/expert_parallel_state.cpp",
     "  check_received_ids();\n", "", "exchange_message_test", "*"),
    ("exchange: arrays of part of an element", "src/comm/ranks/packed.hpp",
     "if (bytes.size() % sizeof(T) != 0) {", "if (false) {",
     "exchange_message_test", "*"),
    # What is asked of a trained model's routers.
    ("specialisation: padding counts", "src/models/evaluation/specialisation.cpp",
     "    if (batch.targets[t] < 0) continue;\n    const auto first", "    const auto first",
     "specialisation_test", "Specialisation.Reads*"),
    ("specialisation: churn the other way round", "src/models/evaluation/specialisation.cpp",
     "return 1 - metrics::churn(b, a);", "return 1 - metrics::churn(a, b);",
     "specialisation_test", "Specialisation.Saturation*"),
    ("specialisation: an untrained router keeps its biases", "src/models/parameters.cpp",
     "  fill_buffers();\n}\n\nvoid Parameters::fill_tensor", "}\n\nvoid Parameters::fill_tensor",
     "specialisation_test", "ResetRouters.*"),
    ("ablation: a token may keep its experts", "src/models/evaluation/ablation.cpp",
     "random % (left - 1)", "random % left", "ablation_test", "Ablation.Shuffling*"),
    ("ablation: in all layers at once", "src/models/evaluation/ablation.cpp",
     "return routing.layer == layer.layer &&", "return", "ablation_test", "Ablation.OfAnExpert*"),
    ("soft-moe: decoding without the group before", "src/models/soft_block.cpp",
     "std::max<std::int64_t>(0, before.length / what_.group - 1) * what_.group",
     "before.length / what_.group * what_.group", "model_exact_test", "ModelBits.OfCached*"),
    ("soft-moe: gradients behind a sequence's end", "src/models/soft_block.cpp",
     "std::fill_n(to + positions_ * hidden_, (padded_ - positions_) * hidden_, 0.0F);", "",
     "model_gradient_test", "ModelGradient.IsThatOfSoftMoe*"),
    ("soft-moe: a group that nobody reads counts", "src/models/soft_block.cpp",
     "padded_ / group - (what_.causal ? 1 : 0)", "padded_ / group",
     "model_gradient_test", "ModelGradient.OfSequencesShorter*"),
    ("study: a loss that rises is not said", "tool/study/sentences.cpp",
     "if (last - lowest[\"mean\"].get<double>() <= kRise) return \"\";", "return \"\";",
     "study_findings_test", "StudyFindings.WhatTrained*"),
    ("attribution: excerpts begin at the first place", "src/models/evaluation/attribution.cpp",
     "    if (place < places_in(document, length)) {", "    place = 0;\n    if (places_in(document, length) > 0) {",
     "attribution_test", "Attribution.Draws*"),
]


def run(*command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False, **options)


def make_tree():
    os.makedirs(TREE, exist_ok=True)
    for file in run("git", "ls-files", cwd=ROOT).stdout.splitlines():
        source, copy = os.path.join(ROOT, file), os.path.join(TREE, file)
        if os.path.exists(source) and not (os.path.exists(copy) and
                                           filecmp.cmp(source, copy, shallow=False)):
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            shutil.copy(source, copy)
    # What is broken leaves unused names behind.
    done = run("cmake", "--preset", "release", "-DSWITCHYARD_WARNINGS_AS_ERRORS=OFF", cwd=TREE)
    if done.returncode != 0:
        sys.exit(done.stdout)


def test(program, chosen):
    """None if the tests pass, else the names of those that do not, or what the compiler says."""
    built = run("cmake", "--build", BUILD, "--target", program)
    if built.returncode != 0:
        return "does not compile:\n" + built.stdout[-2000:]
    done = run(os.path.join(BUILD, "tests", program), f"--gtest_filter={chosen}")
    if done.returncode == 0:
        return None
    failed = {line.split()[3] for line in done.stdout.splitlines()
              if line.startswith("[  FAILED  ]") and "." in line and "(" not in line}
    return ", ".join(sorted(failed)) or f"exit code {done.returncode}"


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n", 1)[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    part, parts = (int(number) for number in options.part.split("/"))
    if not 1 <= part <= parts:
        parser.error(f"--part {options.part}: want I/N with I from 1 to N")
    words = options.words
    chosen = [m for m in MUTATIONS if not words or any(word in m[0] for word in words)]
    if words and not chosen:
        parser.error(f"no mutation's name has {' or '.join(words)}")
    chosen.sort(key=lambda m: m[4])  # those of a test program together: it is built once for them
    chosen = chosen[len(chosen) * (part - 1) // parts:len(chosen) * part // parts]
    if options.list:
        for name, file, before, after, program, _ in chosen:
            print(f"{name}: {file}: {before.strip()} -> {after.strip() or 'nothing'}: {program}")
        return 0
    make_tree()
    wrong = 0
    for program in sorted({m[4] for m in chosen}):
        failed = test(program, "*")
        if failed is not None:
            sys.exit(f"{program} fails before anything is broken: {failed}")
    for name, file, before, after, program, pattern in chosen:
        path = os.path.join(TREE, file)
        with open(path, encoding="utf-8") as source:
            text = source.read()
        if text.count(before) != 1:
            print(f"{name}: '{before}' stands {text.count(before)} times in {file}", flush=True)
            wrong += 1
            continue
        with open(path, "w", encoding="utf-8") as source:
            source.write(text.replace(before, after))
        failed = test(program, pattern)
        with open(path, "w", encoding="utf-8") as source:
            source.write(text)
        caught = failed is not None and not failed.startswith("does not compile")
        print(f"{name}: {'caught by ' + failed if caught else 'SURVIVES' if not failed else failed}",
              flush=True)
        wrong += not caught
    print(f"{len(chosen) - wrong} of {len(chosen)} caught")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
