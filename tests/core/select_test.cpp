// The choice among implementations, what it says, and the environment that asks for it.
#include "core/select.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <utility>
#include <vector>

namespace switchyard {
namespace {

struct Args {
  int size = 0;
  Execution execution{};
};

void do_nothing(const Args&) {}
std::optional<std::string> reject_large(const Args& args) {
  if (args.size > 10) return "more than 10";
  return std::nullopt;
}
std::optional<std::string> reject_odd(const Args& args) {
  if (args.size % 2 != 0) return "odd";
  return std::nullopt;
}
std::string sizes_of(const Args& args) { return fmt::format("{} things", args.size); }

constexpr Implementation<Args> kSmall{"test.small", reject_large, do_nothing};
constexpr Implementation<Args> kEven{"test.even", reject_odd, do_nothing};
constexpr const Implementation<Args>* kBoth[] = {&kSmall, &kEven};

const Implementation<Args>* found(const Args& args) {
  return find<Args>("sort", kBoth, args, sizes_of);
}

class Choices final : public StageRecorder {
 public:
  void begin(std::string_view, void*) override {}
  void end(std::string_view, const StageWork&, void*) override {}
  void chose(std::string_view call, std::string_view implementation) override {
    told.emplace_back(call, implementation);
  }
  std::vector<std::pair<std::string, std::string>> told{};
};

/// For as long as it lives.
class Verbose {
 public:
  Verbose() { set_verbose(true); }
  ~Verbose() { set_verbose(false); }
  Verbose(const Verbose&) = delete;
  Verbose& operator=(const Verbose&) = delete;
};

std::string said(const Args& args) {
  testing::internal::CaptureStderr();
  (void)found(args);
  return testing::internal::GetCapturedStderr();
}

TEST(Select, TheFirstThatAcceptsRunsAndTheRecorderIsToldWhich) {
  Choices recorder;
  EXPECT_EQ(found({.size = 4, .execution = {.recorder = &recorder}}), &kSmall);
  EXPECT_EQ(found({.size = 14, .execution = {.recorder = &recorder}}), &kEven);
  EXPECT_EQ(found({.size = 15, .execution = {.recorder = &recorder}}), nullptr);
  using Told = std::vector<std::pair<std::string, std::string>>;
  EXPECT_EQ(recorder.told, (Told{{"sort", "test.small"}, {"sort", "test.even"}}));
}

TEST(Select, NobodyIsAnErrorThatNamesEachReason) {
  try {
    (void)select<Args>("sort", kBoth, Args{.size = 15}, sizes_of);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    const std::string message = error.what();
    EXPECT_NE(message.find("test.small: more than 10; test.even: odd"), std::string::npos)
        << message;
  }
}

TEST(Select, OneLineSaysWhatRunsForWhichSizesAndWhyNotTheOthersWhereThatIsAskedFor) {
  EXPECT_EQ(said({.size = 14}), "");
  const Verbose verbose;
  EXPECT_EQ(said({.size = 14}),
            "switchyard: sort of 14 things: test.even; not test.small: more than 10\n");
  EXPECT_EQ(said({.size = 4}),
            "switchyard: sort of 4 things: test.small; not test.even: comes later in the order\n");
  EXPECT_EQ(said({.size = 15}),
            "switchyard: sort of 15 things: none; not test.small: more than 10; test.even: odd\n");
}

TEST(Select, TheLineSaysWhichOfItsKernelsSizesDecideFor) {
  static constexpr Implementation<Args> kTiled{
      "test.tiled", reject_odd, do_nothing,
      [](const Args& args) -> std::string { return args.size > 10 ? "wide" : "narrow"; }};
  static constexpr const Implementation<Args>* kOne[] = {&kTiled};
  Choices recorder;
  const Verbose verbose;
  testing::internal::CaptureStderr();
  (void)find<Args>("sort", kOne, Args{.size = 4, .execution = {.recorder = &recorder}}, sizes_of);
  (void)find<Args>("sort", kOne, Args{.size = 12}, sizes_of);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "switchyard: sort of 4 things: test.tiled (narrow)\n"
            "switchyard: sort of 12 things: test.tiled (wide)\n");
  EXPECT_EQ(recorder.told.at(0).second, "test.tiled");
}

TEST(Environment, EveryVariableIsInTheTableOnceWithAMeaning) {
  std::set<std::string> names;
  for (const VariableSpec& spec : environment_table()) {
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name;
    EXPECT_TRUE(std::string(spec.name).starts_with("SWITCHYARD_"));
    EXPECT_NE(std::string(spec.meaning), "");
    EXPECT_NE(std::string(spec.without), "");
    EXPECT_EQ(value_of(spec.variable), std::getenv(spec.name));
  }
}

TEST(Environment, NamesThatNobodyReadsAreUnknownButThoseOfTests) {
  setenv("SWITCHYARD_VERBOS", "1", 1);
  setenv("SWITCHYARD_TEST_WORLDS", "1", 1);
  setenv("SWITCHYARD_VERBOSE", "0", 1);
  EXPECT_EQ(unknown_variables(), std::vector<std::string>{"SWITCHYARD_VERBOS"});
  unsetenv("SWITCHYARD_VERBOS");
  unsetenv("SWITCHYARD_VERBOSE");
  EXPECT_EQ(unknown_variables(), std::vector<std::string>{});
}

}  // namespace
}  // namespace switchyard
