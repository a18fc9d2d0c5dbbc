// Every rank writes its values to every other and compares: if any two ranks differ, each rank
// differs from somebody and throws, so nobody goes on alone.
#include "comm/ranks/agreement.hpp"

#include <cstring>
#include <string>
#include <vector>

#include "core/check.hpp"

namespace switchyard {
namespace {

std::string text_of(const AgreedValue& value, std::int64_t number) {
  return value.text != nullptr ? value.text(number) : fmt::format("{}", number);
}

}  // namespace

void require_agreement(Communicator& communicator, std::span<const AgreedValue> values) {
  const int num_ranks = communicator.size();
  const std::size_t record = values.size() * sizeof(std::int64_t);
  const auto window =
      communicator.create_window(record * static_cast<std::size_t>(num_ranks), num_ranks);
  std::vector<std::int64_t> own;
  for (const AgreedValue& value : values) own.push_back(value.value);
  for (int to = 0; to < num_ranks; ++to) {
    window->put(to, record * static_cast<std::size_t>(communicator.rank()), own.data(), record);
    window->signal(to, communicator.rank(), 1);
  }
  std::string differences;
  std::vector<std::int64_t> other(values.size());
  for (int from = 0; from < num_ranks; ++from) {
    window->wait(from, 1, {.phase = "agreement", .rank = from});
    std::memcpy(other.data(), window->local() + record * static_cast<std::size_t>(from), record);
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (other[i] == own[i]) continue;
      differences +=
          fmt::format("{}rank {} has {}={}, rank {} (here) has {}", differences.empty() ? "" : "; ",
                      from, values[i].name, text_of(values[i], other[i]), communicator.rank(),
                      text_of(values[i], own[i]));
    }
  }
  communicator.barrier("agreement");  // nobody drops the window while another still writes to it
  if (!differences.empty()) fail(ErrorCode::kCommunication, "ranks disagree: {}", differences);
}

void require_no_trouble(Communicator& communicator, ErrorCode code, const std::string& trouble) {
  // Longer words are cut: they are for a message.
  constexpr std::size_t kWords = 256;
  const int num_ranks = communicator.size();
  const auto window =
      communicator.create_window(kWords * static_cast<std::size_t>(num_ranks), num_ranks);
  const std::string words = trouble.substr(0, kWords - 1);
  for (int to = 0; to < num_ranks; ++to) {
    window->put(to, kWords * static_cast<std::size_t>(communicator.rank()), words.c_str(),
                words.size() + 1);
    window->signal(to, communicator.rank(), 1);
  }
  std::string first = trouble;
  for (int from = 0; from < num_ranks; ++from) {
    window->wait(from, 1, {.phase = "agreement", .rank = from});
    const auto* said =
        reinterpret_cast<const char*>(window->local()) + kWords * static_cast<std::size_t>(from);
    if (first.empty() && *said != '\0') first = fmt::format("rank {}: {}", from, said);
  }
  communicator.barrier("agreement");
  if (!first.empty()) fail(code, "{}", first);
}

}  // namespace switchyard
