#pragma once

#ifndef NDEBUG
#include <atomic>
#endif

#include "core/check.hpp"

namespace switchyard {

/// One call at a time on an object that takes no lock. In debug builds a call that begins while
/// another is under way throws Error{kInvalidArgument} that names the two, before it touches
/// anything; in others nothing of it is left.
class OneCaller {
 public:
  /// For as long as a call lasts.
  class Call {
   public:
#ifdef NDEBUG
    Call(OneCaller& /*caller*/, const char* /*name*/) noexcept {}
    ~Call() {}  // NOLINT(modernize-use-equals-default): or the compiler would call it unused
#else
    Call(OneCaller& caller, const char* name) : caller_(caller) {
      const char* other = nullptr;
      require(caller_.current_.compare_exchange_strong(other, name),
              "{} is called while {} is under way on the same object: one thread at a time", name,
              other);
    }
    ~Call() { caller_.current_.store(nullptr); }
#endif
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

#ifndef NDEBUG
   private:
    OneCaller& caller_;
#endif
  };

#ifndef NDEBUG
 private:
  std::atomic<const char*> current_ = nullptr;
#endif
};

}  // namespace switchyard
