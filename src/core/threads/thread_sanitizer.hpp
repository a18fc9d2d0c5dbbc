#pragma once

// SWITCHYARD_THREAD_SANITIZER: whether this build has the thread sanitizer. GCC defines a macro,
// clang has a feature.
#if defined(__SANITIZE_THREAD__)
#define SWITCHYARD_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SWITCHYARD_THREAD_SANITIZER 1
#endif
#endif
#if !defined(SWITCHYARD_THREAD_SANITIZER)
#define SWITCHYARD_THREAD_SANITIZER 0
#endif
