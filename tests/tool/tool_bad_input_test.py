"""Every kind of wrong use and bad input that we could think of: exit code 2, one line on stderr
that names the option or file, the value and what would be right, no output file, no crash."""

import json
import os
import shutil
import struct
import tempfile
import unittest

import numpy as np

from tool_support import (ToolTest, make_checkpoint, run_tool, write_raw_safetensors,
                          write_safetensors)


def f32(*shape):
    return np.ones(shape, np.float32).tobytes()


def routing(expert, weight=None):
    """The tensors of a routing file."""
    expert = np.array(expert, np.int32)
    weight = np.ones(expert.shape, np.float32) if weight is None else np.array(weight, np.float32)
    return {"expert": ("I32", expert.shape, expert.tobytes()),
            "weight": ("F32", weight.shape, weight.tobytes())}


def make_files(d):
    """Good and bad files in the directory d."""
    make_checkpoint(f"{d}/good")
    np.save(f"{d}/good.npy", np.ones((3, 64), np.float32))
    np.save(f"{d}/narrow.npy", np.ones((3, 63), np.float32))
    np.save(f"{d}/cube.npy", np.ones((3, 2, 64), np.float32))
    np.save(f"{d}/int.npy", np.ones((3, 64), np.int32))
    np.save(f"{d}/fortran.npy", np.asfortranarray(np.ones((3, 64), np.float32)))
    np.save(f"{d}/big_endian.npy", np.ones((3, 64), ">f4"))
    for name, value in ("nan", np.nan), ("inf", np.inf):
        tokens = np.ones((3, 64), np.float32)
        tokens[1, 5] = value
        np.save(f"{d}/{name}.npy", tokens)
    with open(f"{d}/good.npy", "rb") as file:
        good = file.read()
    for name, content in (("short.npy", good[:-1]), ("magic.npy", b"NUMPY" + good[5:]),
                          ("empty.npy", b""), ("tokens.bin", good), ("empty.safetensors", b""),
                          ("text.txt", b"hello")):
        with open(f"{d}/{name}", "wb") as file:
            file.write(content)
    one = {"dtype": "F32", "shape": [3, 64], "data_offsets": [0, 768]}
    two = {"dtype": "F32", "shape": [3, 64], "data_offsets": [4, 772]}
    raw = lambda name, header, *more: write_raw_safetensors(f"{d}/{name}.safetensors",
                                                            json.dumps(header).encode(), *more)
    write_raw_safetensors(f"{d}/no_json.safetensors", b"{nothing}")
    write_raw_safetensors(f"{d}/long.safetensors", b"{}", b"", 1 << 62)
    write_raw_safetensors(f"{d}/twice.safetensors",
                          b'{"a":%b,"a":%b}' % ((json.dumps(one).encode(),) * 2), f32(3, 64))
    raw("overlap", {"a": one, "b": two}, f32(3, 64) + b"1234")
    raw("outside", {"a": {**one, "data_offsets": [0, 4096]}}, f32(3, 64))
    raw("wrong_size", {"a": {**one, "shape": [3, 65]}}, f32(3, 64))
    raw("overflow", {"a": {**one, "shape": [1 << 40, 1 << 40]}}, f32(3, 64))
    raw("negative", {"a": {**one, "shape": [-3, 64]}}, f32(3, 64))
    raw("strange_type", {"a": {**one, "dtype": "F77"}}, f32(3, 64))
    raw("deep", json.loads("[" * 80 + "]" * 80))
    write_safetensors(f"{d}/two.safetensors",
                      {"a": ("F32", [3, 64], f32(3, 64)), "b": ("F32", [3, 64], f32(3, 64))})
    write_safetensors(f"{d}/routing.safetensors", routing([[0, 1]] * 3))
    write_safetensors(f"{d}/routing_4.safetensors", routing([[0, 1]] * 4))
    write_safetensors(f"{d}/routing_wide.safetensors", routing([[0, 1, 2]] * 3))
    write_safetensors(f"{d}/routing_id.safetensors", routing([[0, 1], [0, 4], [0, 1]]))
    write_safetensors(f"{d}/routing_low.safetensors", routing([[0, 1], [0, -2], [0, 1]]))
    write_safetensors(f"{d}/routing_nan.safetensors",
                      routing([[0, 1]] * 3, [[1, 1], [1, np.nan], [1, 1]]))
    write_safetensors(f"{d}/routing_half.safetensors",
                      {"expert": routing([[0, 1]] * 3)["expert"]})
    make_bad_checkpoints(d)


def make_bad_checkpoints(d):
    def spoiled(name, change):
        shutil.copytree(f"{d}/good", f"{d}/{name}")
        change(f"{d}/{name}")

    def config(**changes):
        def change(path):
            with open(f"{path}/config.json", encoding="utf-8") as file:
                content = json.load(file)
            for key, value in changes.items():
                content.pop(key, None) if value is None else content.update({key: value})
            with open(f"{path}/config.json", "w", encoding="utf-8") as file:
                json.dump(content, file)
        return change

    def cut(path):
        with open(f"{path}/model.safetensors", "r+b") as file:
            file.truncate(os.path.getsize(file.name) - 10)

    def nan_in(tensor, element=0):
        """Makes one value of a bf16 tensor NaN."""
        def change(path):
            with open(f"{path}/model.safetensors", "r+b") as file:
                content = file.read()
                length = struct.unpack("<Q", content[:8])[0]
                header = json.loads(content[8:8 + length])
                entry = next(v for k, v in header.items() if k.endswith(tensor))
                file.seek(8 + length + entry["data_offsets"][0] + 2 * element)
                file.write(b"\xff\x7f")
        return change

    spoiled("no_config", lambda path: os.remove(f"{path}/config.json"))
    spoiled("no_tensors", lambda path: os.remove(f"{path}/model.safetensors"))
    spoiled("no_family", config(model_type="unheard-of"))
    spoiled("no_hidden", config(hidden_size=None))
    spoiled("text_hidden", config(hidden_size="many"))
    spoiled("huge_hidden", config(hidden_size=1 << 60))
    spoiled("other_hidden", config(hidden_size=128))
    spoiled("more_experts", config(num_local_experts=5))
    spoiled("top_k", config(num_experts_per_tok=9))
    spoiled("cut", cut)
    spoiled("nan_gate", nan_in("gate.weight"))
    spoiled("nan_expert", nan_in("experts.2.w2.weight", 5 * 32 + 7))
    os.mkdir(f"{d}/nothing")


# (name, command line, words on stderr). {d} is the directory of files; `run` stands for
# "run --checkpoint {d}/good --output {d}/out.npy", with --tokens {d}/good.npy unless told otherwise.
RUN = "run --checkpoint {d}/good --output {d}/out.npy"
TOKENS = RUN + " --tokens {d}/"
GOOD = TOKENS + "good.npy"
MAKE = "make-checkpoint --output {d}/made --family mixtral"
SIZED = MAKE + " --hidden 64 --inner 32 --experts 4 --top-k 2"
CASES = [
    # Wrong use.
    ("no command", "", ["no command", "run", "bench"]),
    ("unknown command", "runn", ["'runn'", "did you mean run?"]),
    ("misspelt command", "trian", ["'trian'", "did you mean train?"]),
    ("unknown option", GOOD + " --checkpiont x", ["--checkpiont", "did you mean --checkpoint?"]),
    ("unknown option with its value", MAKE + " --hiden=64",
     ["--hiden=64", "did you mean --hidden?"]),
    ("misspelt family", SIZED.replace("mixtral", "mixtrall"),
     ["--family", "'mixtrall'", "qwen3-moe|", "did you mean mixtral?"]),
    ("misspelt model", MAKE + " --model mixtral8x7b",
     ["--model", "'mixtral8x7b'", "did you mean mixtral-8x7b?"]),
    ("misspelt layout", GOOD + " --layout alinged:8", ["'alinged:8'", "did you mean aligned?"]),
    ("unexpected word", GOOD + " word", ["word", "run"]),
    ("missing option", "run --tokens {d}/good.npy", ["--checkpoint", "missing"]),
    ("missing value", GOOD + " --ranks", ["--ranks", "R"]),
    ("option twice", GOOD + " --ranks 1 --ranks 2", ["--ranks", "2 times", "once"]),
    ("not a number", GOOD + " --ranks two", ["--ranks", "'two'", "1 to 64"]),
    ("number with a tail", GOOD + " --ranks 2x", ["--ranks", "'2x'", "1 to 64"]),
    ("number too large", GOOD + " --ranks 65", ["--ranks", "'65'", "1 to 64"]),
    ("number too small", GOOD + " --threads 0", ["--threads", "'0'", "1 to"]),
    ("number beyond 64 bits", GOOD + " --timeout 99999999999999999999", ["--timeout", "'9999"]),
    ("unknown word", GOOD + " --compute f64", ["--compute", "'f64'", "f32|bf16|f16|fp8\n"]),
    ("alignment of zero", GOOD + " --layout aligned:0", ["--layout", "aligned:0", "aligned:N"]),
    ("unknown drop policy", GOOD + " --drop-policy coin", ["--drop-policy", "'coin'", "bpr"]),
    ("drop policy alone", GOOD + " --drop-policy probs", ["--drop-policy", "--capacity-factor"]),
    ("capacity not finite", GOOD + " --capacity-factor nan", ["--capacity-factor", "'nan'"]),
    ("capacity of zero", GOOD + " --capacity-factor 0", ["--capacity-factor", "'0'"]),
    ("unknown instruction set", GOOD + " --isa mmx", ["--isa", "'mmx'", "portable"]),
    ("engine of GPUs on a CPU", GOOD + " --engine nccl", ["--engine", "nccl"]),
    ("tokens and text", GOOD + " --text {d}/text.txt", ["--tokens", "--text", "one of them"]),
    ("neither tokens nor text", RUN, ["--tokens", "--text", "one of them"]),
    ("empty value", RUN + " --tokens=", ["--tokens"]),
    # Outputs.
    ("output of no kind", GOOD.replace("out.npy", "out.txt"), ["--output: ", "out.txt", ".npy"]),
    ("bf16 into .npy", GOOD + " --output-dtype bf16", ["bf16", ".safetensors"]),
    ("output in no directory", GOOD.replace("out.npy", "no/out.npy"), ["--output", "{d}/no"]),
    ("output is a directory", GOOD.replace("out.npy", "dir.npy"), ["--output", "directory"]),
    ("routing into .npy", GOOD + " --routing-output {d}/r.npy", ["--routing-output", "r.npy"]),
    # Tokens.
    ("no such file", TOKENS + "none.npy", ["none.npy"]),
    ("ending unknown", TOKENS + "tokens.bin", ["tokens.bin", ".npy", ".safetensors"]),
    ("tokens too narrow", TOKENS + "narrow.npy", ["narrow.npy", "63", "64"]),
    ("tokens of rank 3", TOKENS + "cube.npy", ["cube.npy"]),
    ("tokens of integers", TOKENS + "int.npy", ["int.npy"]),
    ("tokens by columns", TOKENS + "fortran.npy", ["fortran.npy"]),
    ("tokens big endian", TOKENS + "big_endian.npy", ["big_endian.npy"]),
    ("tokens with NaN", TOKENS + "nan.npy", ["nan.npy", "[1, 5]", "finite"]),
    ("tokens with infinity", TOKENS + "inf.npy", ["inf.npy", "[1, 5]", "finite"]),
    ("npy truncated", TOKENS + "short.npy", ["short.npy"]),
    ("npy without magic", TOKENS + "magic.npy", ["magic.npy"]),
    ("npy empty", TOKENS + "empty.npy", ["empty.npy"]),
    ("tensor of .npy", TOKENS + "good.npy:a", ["good.npy"]),
    ("two tensors, none named", TOKENS + "two.safetensors", ["two.safetensors"]),
    ("no such tensor", TOKENS + "two.safetensors:c", ["two.safetensors", "c"]),
    ("safetensors empty", TOKENS + "empty.safetensors", ["empty.safetensors"]),
    ("header is no JSON", TOKENS + "no_json.safetensors", ["no_json.safetensors"]),
    ("header too long", TOKENS + "long.safetensors", ["long.safetensors"]),
    ("tensor twice", TOKENS + "twice.safetensors", ["twice.safetensors", "a"]),
    ("tensors overlap", TOKENS + "overlap.safetensors:a", ["overlap.safetensors"]),
    ("offset outside", TOKENS + "outside.safetensors", ["outside.safetensors", "a"]),
    ("shape against offsets", TOKENS + "wrong_size.safetensors", ["wrong_size.safetensors", "a"]),
    ("shape overflows", TOKENS + "overflow.safetensors", ["overflow.safetensors", "a"]),
    ("shape negative", TOKENS + "negative.safetensors", ["negative.safetensors", "a"]),
    ("type unknown", TOKENS + "strange_type.safetensors", ["strange_type.safetensors", "F77"]),
    ("JSON too deep", TOKENS + "deep.safetensors", ["deep.safetensors"]),
    ("no such text", RUN + " --text {d}/none.txt", ["--text", "none.txt"]),
    ("text is a directory", RUN + " --text {d}", ["--text"]),
    # Routing.
    ("routing for other tokens", GOOD + " --routing-input {d}/routing_4.safetensors",
     ["--routing-input", "routing_4", "[4, 2]", "[3, 2]"]),
    ("routing of another K", GOOD + " --routing-input {d}/routing_wide.safetensors",
     ["routing_wide", "[3, 3]", "[3, 2]"]),
    ("routing id too large", GOOD + " --routing-input {d}/routing_id.safetensors",
     ["routing_id", "token 1", "4", "-1 to 3"]),
    ("routing id too small", GOOD + " --routing-input {d}/routing_low.safetensors",
     ["routing_low", "-2"]),
    ("routing weight NaN", GOOD + " --routing-input {d}/routing_nan.safetensors",
     ["routing_nan", "token 1", "finite"]),
    ("routing without weight", GOOD + " --routing-input {d}/routing_half.safetensors",
     ["routing_half", "weight"]),
    # Checkpoints.
    ("no such checkpoint", GOOD.replace("/good ", "/none "), ["none"]),
    ("empty directory", GOOD.replace("/good ", "/nothing "), ["nothing"]),
    ("no config", GOOD.replace("/good ", "/no_config "), ["config.json"]),
    ("no tensors", GOOD.replace("/good ", "/no_tensors "), ["safetensors"]),
    ("family unknown", GOOD.replace("/good ", "/no_family "), ["unheard-of", "mixtral"]),
    ("size missing", GOOD.replace("/good ", "/no_hidden "), ["config.json", "hidden_size"]),
    ("size is a text", GOOD.replace("/good ", "/text_hidden "), ["config.json", "hidden_size"]),
    ("size is huge", GOOD.replace("/good ", "/huge_hidden "), ["hidden_size"]),
    ("size disagrees", GOOD.replace("/good ", "/other_hidden "), ["64", "128"]),
    ("expert missing", GOOD.replace("/good ", "/more_experts "), ["experts"]),
    ("top-k beyond experts", GOOD.replace("/good ", "/top_k "), ["9", "4"]),
    ("checkpoint truncated", GOOD.replace("/good ", "/cut "), ["model.safetensors"]),
    ("router with NaN", GOOD.replace("/good ", "/nan_gate "), ["NaN", "token 0", "expert 0"]),
    ("router with NaN, checked", GOOD.replace("/good ", "/nan_gate ") + " --check",
     ["nan_gate", "layer 0", "router weight[0, 0] is nan"]),
    ("expert with NaN, checked", GOOD.replace("/good ", "/nan_expert ") + " --check",
     ["nan_expert", "layer 0", "expert 2, down weight[5, 7] is nan"]),
    ("layer out of range", GOOD + " --layer 7", ["--layer", "7", "0 to 0"]),
    # Other commands.
    ("family not known", MAKE.replace("mixtral", "llama"), ["--family", "'llama'", "olmoe"]),
    ("sizes missing", MAKE + " --hidden 64", ["--inner", "--model"]),
    ("model unknown", MAKE + " --model gpt-2", ["--model", "'gpt-2'", "mixtral-8x7b"]),
    ("model and sizes", MAKE + " --model mixtral-8x7b --hidden 64", ["--model", "sizes"]),
    ("model of another family", MAKE + " --model olmoe-1b-7b", ["--family", "olmoe", "mixtral"]),
    ("K exceeds E", SIZED.replace("--top-k 2", "--top-k 5"), ["--top-k", "5", "4"]),
    ("groups do not divide", SIZED + " --groups 3", ["--groups", "3", "4"]),
    ("top groups exceed groups", SIZED + " --groups 2 --top-groups 3", ["--top-groups", "3", "2"]),
    ("suite unknown", "bench --suite all", ["--suite", "'all'", "fused-moe"]),
    ("a mixing for a router", "bench --model mixtral-8x7b --router soft-moe",
     ["router soft-moe gives no token to an expert", "--suite soft-moe"]),
    ("adapters for a router", "bench --model mixtral-8x7b --router perft",
     ["router perft is of adapters beside a layer", "verify --router perft"]),
    ("adapters of no such kind", "verify --router perft:kind=wide",
     ["kind='wide'", "routed|embedded|dense|shared"]),
    ("load of no checkpoint", "bench --suite load", ["--checkpoint", "missing", "load"]),
    ("checkpoint for no load", "bench --suite topk --checkpoint {d}/good", ["--checkpoint", "load"]),
    ("stored weights of no checkpoint", "bench --model gpt-oss-20b --weights stored",
     ["--weights", "stored", "--suite load", "mxfp4"]),
    ("load of no such checkpoint", "bench --suite load --checkpoint {d}/none", ["none"]),
    ("router unknown", GOOD + " --router topk", ["--router", "'topk'", "top-k, switch"]),
    ("router without the option", GOOD + " --router hash:seed=1", ["hash", "'seed'", "top-k, salt"]),
    ("router's option out of range", GOOD + " --router top-p:threshold=2", ["threshold='2'", "to 1"]),
    ("router of more experts than there are", GOOD + " --router uniform:top-k=5",
     ["uniform", "top_k=5", "num_experts=4"]),
    ("hash router without token ids", GOOD + " --router hash", ["hash", "--tokens", "--text"]),
    ("group that does not divide the tokens", GOOD + " --router expert-choice:group=2",
     ["group=2", "3 tokens"]),
    ("capacity of a router without a K", GOOD + " --router relu --capacity-factor 1.5",
     ["capacity_factor=1.5", "relu"]),
    ("router and routing", GOOD + " --router switch --routing-input {d}/routing.safetensors",
     ["--router", "--routing-input"]),
    ("router of one case", "verify --router relu --case {{}}", ["--router", "--case"]),
    ("router beside a skew", "bench --model olmoe-1b-7b --skew zipf:1 --router uniform",
     ["--router", "--skew zipf:1"]),
    ("router of a suite", "bench --suite pack --router uniform", ["--router", "--suite pack"]),
    ("skew unknown", "bench --model olmoe-1b-7b --skew zipf", ["--skew", "'zipf'", "zipf:S"]),
    ("share above one", "bench --model olmoe-1b-7b --skew hot:1.5", ["--skew", "'hot:1.5'"]),
    ("empty item of a list", "bench --model olmoe-1b-7b --num-tokens 1,,2", ["--num-tokens", "''"]),
    ("variant unknown", "bench --suite all2all --variant flat,round", ["--variant", "'round'",
                                                                       "bucketed"]),
    ("variant of another suite", "bench --suite topk --variant flat", ["--variant", "all2all"]),
    ("tokens of a suite", "bench --suite topk --num-tokens 3", ["topk", "own sizes"]),
    ("sizes for an exchange", "bench --suite fixed-size --hidden 64", ["fixed-size", "own sizes"]),
    ("stages of an exchange", "bench --suite all2all --stages layer", ["--stages", "all2all"]),
    ("peer of an exchange", "bench --suite all2all --peer onednn", ["--peer", "onednn", "mpi"]),
    ("peer of a layer", "bench --model olmoe-1b-7b --peer mpi", ["--peer", "'mpi'", "onednn"]),
    ("peer without processes", "bench --suite fixed-size --peer mpi", ["--peer", "mpi"]),
    ("too few ranks for top-k", "bench --suite fixed-size --ranks 1", ["--ranks", "1 experts"]),
    ("only what a suite has not", "bench --suite forward --only olmoe,none",
     ["--only", "'none'", "forward", "qwen3-30b, 30b-i256"]),
    ("only without a suite", "bench --only olmoe", ["--only", "--suite"]),
    ("only of an exchange", "bench --suite all2all --only flat", ["--only", "all2all"]),
    ("sizes for generation", "bench --suite generate --hidden 64", ["--hidden", "64", "generate"]),
    ("a peer of generation", "bench --suite generate --peer onednn", ["--peer", "onednn", "generate"]),
    ("a capacity of generation", "bench --suite generate --capacity-factor 1.5",
     ["--capacity-factor", "1.5", "generate"]),
    ("a preset that there is not", "bench --suite generate --only tiny",
     ["--only", "'tiny'", "smoke, cpu-10min, s, m"]),
    ("SonicMoE of another suite", "bench --suite topk --peer sonicmoe",
     ["--peer", "sonicmoe", "forward or training"]),
    ("SonicMoE of a pass by itself", "bench --suite training --pass backward --peer sonicmoe",
     ["--pass", "backward", "sonicmoe", "--suite training", "both"]),
    ("a peer of other weights", "bench --model gpt-oss-20b --peer triton-mxfp4",
     ["--peer", "triton-mxfp4", "--weights mxfp4"]),
    ("DeepGEMM on a CPU", "bench --hidden 64 --inner 64 --experts 4 --top-k 2 --weights fp8 --compute fp8 "
     "--peer deepgemm", ["--peer", "deepgemm", "--backend cuda"]),
    ("DeepGEMM with rows of bf16", "bench --hidden 64 --inner 64 --experts 4 --top-k 2 --weights fp8 "
     "--peer deepgemm", ["--peer", "deepgemm", "--compute fp8"]),
    ("a peer on a CPU", "bench --model gpt-oss-20b --weights mxfp4 --peer triton-mxfp4",
     ["--peer", "triton-mxfp4", "--backend cuda"]),
    ("a peer of another layout", "bench --model gpt-oss-20b --weights mxfp4 --peer triton-mxfp4 --layout padded",
     ["--peer", "triton-mxfp4", "--layout padded"]),
    ("a peer of another suite", "bench --suite layer --weights mxfp4 --peer triton-mxfp4",
     ["--peer", "triton-mxfp4", "--suite layer"]),
    ("two peers of other weights",
     "bench --model gpt-oss-20b --weights mxfp4 --peer triton-mxfp4 --peer deepgemm",
     ["--peer", "triton-mxfp4 and deepgemm"]),
    ("torch beside training", "bench --suite training --peer torch", ["--pass", "torch"]),
    ("SonicMoE on a CPU", "bench --suite forward --peer sonicmoe",
     ["--peer", "sonicmoe", "--backend cuda"]),
    ("suite and model", "bench --suite topk --model olmoe-1b-7b", ["--suite", "topk"]),
    ("nothing to measure", "bench", ["--hidden", "--model"]),
    ("stage unknown", "bench --model olmoe-1b-7b --stages gemm9", ["--stages", "'gemm9'", "gemm1"]),
    ("results in no directory", "bench --model olmoe-1b-7b --results {d}/no/r.jsonl",
     ["--results", "{d}/no"]),
    ("fault unknown", "verify --fault nap", ["--fault", "'nap'", "absent"]),
    ("soak and fault", "verify --soak 10 --fault late", ["--soak", "10", "--fault"]),
    ("soak and pass", "verify --soak 10 --pass both", ["--pass", "both", "--soak"]),
    ("pass that is none", "verify --pass sideways", ["--pass", "sideways"]),
    ("soak below zero", "verify --soak -1", ["--soak", "'-1'"]),
    ("case is no JSON", "verify --case {{", ["case"]),
    ("report of no file", "report {d}/none.jsonl --output {d}/out.npy", ["none.jsonl"]),
    ("report of a directory and a file", "report {d} {d}/text.txt --output {d}/out.npy",
     ["FILE: {d} is a directory", "alone"]),
    ("report of another file", "report {d}/text.txt --output {d}/out.npy", ["text.txt", "line 1"]),
    ("completion of another shell", "completion fish", ["'fish'", "bash"]),
    ("help on no command", "help rum", ["'rum'"]),
]


class BadInput(ToolTest):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        make_files(cls.folder.name)
        os.mkdir(f"{cls.folder.name}/dir.npy")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_every_kind_is_refused_with_the_right_words(self):
        d = self.folder.name
        before = sorted(os.listdir(d))
        for name, line, words in CASES:
            with self.subTest(name):
                done = run_tool(*line.format(d=d).split())
                self.assert_one_line(done, 2, [word.format(d=d) for word in words])
                self.assertEqual(sorted(os.listdir(d)), before, "a file was left behind")

    def test_a_backend_that_is_not_built_in_is_refused_with_those_that_are(self):
        done = run_tool(*GOOD.format(d=self.folder.name).split(), "--backend", "cuda")
        if "not built in" not in done.stderr:
            self.skipTest("this build has CUDA")
        self.assert_one_line(done, 2, ["--backend", "cuda", "not built in", "cpu"])

    def test_a_number_of_a_case_that_is_none_is_named_with_its_value(self):
        corpus = os.path.join(os.path.dirname(__file__), "../../fuzz/corpus/case/first")
        with open(corpus, encoding="utf-8") as file:
            case = json.load(file)
        self.assert_fine(run_tool("verify", "--case", json.dumps(case)))
        for name, value in ("alignment", 0), ("E", 10**18), ("E", 10**30), ("E", 0):
            done = run_tool("verify", "--case", json.dumps({**case, name: value}))
            said = f"{value:.0e}" if value > 2**64 else value
            self.assert_one_line(done, 2, ["--case", f'"{name}" is {said}, want a whole number from 1 to'])

    def test_the_table_has_more_than_forty_kinds(self):
        self.assertGreater(len({name for name, _, _ in CASES}), 40)

    def test_the_good_files_are_good(self):
        """Else a case above could be refused for another reason than its own."""
        d = self.folder.name
        out = f"{d}/fine.npy"
        done = run_tool("run", "--checkpoint", f"{d}/good", "--tokens", f"{d}/good.npy",
                        "--routing-input", f"{d}/routing.safetensors", "--output", out)
        self.assert_fine(done)
        self.assertEqual(np.load(out).shape, (3, 64))
        os.remove(out)


if __name__ == "__main__":
    unittest.main()
