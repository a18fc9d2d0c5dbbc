#pragma once

// Whether a sanitizer watches, under which a test takes up to twenty times as long: those that go
// through the same code with many numbers take fewer then.

#include "core/threads/thread_sanitizer.hpp"

namespace switchyard {

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = SWITCHYARD_THREAD_SANITIZER != 0;
#endif
#else
inline constexpr bool kSanitized = SWITCHYARD_THREAD_SANITIZER != 0;
#endif

}  // namespace switchyard
