// Asks torch in a Python process. Tensors go through a file.
#include "bench/peers/torch.hpp"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "bench/peer_scripts.hpp"
#include "bench/peers/python_process.hpp"
#include "checkpoint/files/safetensors.hpp"
#include "core/check.hpp"

namespace switchyard::bench {
namespace {

using nlohmann::json;

/// A folder of its own that goes with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name =
        (std::filesystem::temp_directory_path() / "switchyard-torch-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) {
      fail(ErrorCode::kIo, "{} cannot be made ({})", name, std::strerror(errno));
    }
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  [[nodiscard]] std::filesystem::path operator/(const char* name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

template <typename T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

void write_inputs(const std::filesystem::path& path, const TorchWork& work) {
  const std::int64_t num_tokens = work.tokens.rows;
  const std::int64_t hidden = work.tokens.cols;
  const std::int64_t top_k = work.c.config.router.top_k();
  const std::int64_t experts = work.c.config.router.num_experts;
  const std::vector<StoredTensor> tensors{
      {.spec = {"tokens", stored_type(work.tokens.dtype), {num_tokens, hidden}},
       .bytes = {work.tokens.data, static_cast<std::size_t>(work.tokens.bytes())}},
      {.spec = {"expert", StoredType::kI32, {num_tokens, top_k}},
       .bytes = bytes_of(work.routing.expert)},
      {.spec = {"weight", StoredType::kF32, {num_tokens, top_k}},
       .bytes = bytes_of(work.routing.weight)},
      {.spec = {"gate", StoredType::kF32, {experts, hidden}}, .bytes = std::as_bytes(work.gate)},
  };
  write_safetensors(path, tensors);
}

}  // namespace

struct TorchPeer::State {
  explicit State(const char* device) : process("torch", kTorchPeerScript, device) {}
  PythonProcess process;
  TemporaryFolder folder;
  std::string version;
};

TorchPeer::TorchPeer(Backend backend)
    : state_(std::make_unique<State>(backend == Backend::kCuda ? "cuda" : "cpu")) {
  state_->version = state_->process.hello().at("version");
}
TorchPeer::~TorchPeer() = default;

const std::string& TorchPeer::version() const { return state_->version; }

void TorchPeer::measure(const TorchWork& work, CaseResult& result) {
  if (work.tokens.rows == 0) return;
  const std::filesystem::path file = state_->folder / "inputs.safetensors";
  write_inputs(file, work);
  const LayerCase& c = work.c;
  json answer = state_->process.ask({{"work", work.work},
                                     {"file", file.string()},
                                     {"seed", c.seed},
                                     {"H", c.config.experts.hidden},
                                     {"I", c.config.experts.inner},
                                     {"E", c.config.router.num_experts},
                                     {"K", c.config.router.top_k()},
                                     {"gated", c.config.experts.gated},
                                     {"activation", to_string(c.config.experts.activation)}});
  if (answer.contains("median_us")) result.torch_us = answer.at("median_us");
  answer["version"] = state_->version;
  result.more["torch"] = std::move(answer);
}

void judge_against_torch(const std::string& bar, double target, CaseResult& result) {
  const auto torch = result.torch_us.find("experts+combine");
  if (torch == result.torch_us.end()) return;
  double ours = 0;
  for (const StageFigures& stage : result.stages) {
    if (stage.stage.starts_with("gemm") || stage.stage == "combine") ours += stage.us.median;
  }
  const double ratio = torch->second / ours;
  result.more["bar"] = bar;
  result.more["value"] = ratio;
  result.more["target"] = target;
  result.more["holds"] = ratio >= target;
}

}  // namespace switchyard::bench
