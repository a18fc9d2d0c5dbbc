#ifndef SWITCHYARD_TESTS_C_API_SUPPORT_H
#define SWITCHYARD_TESTS_C_API_SUPPORT_H

/* What the C99 programs of the tests share: descriptions of tensors, and the count of failures. */
#include <stdio.h>
#include <string.h>

#include "switchyard/switchyard.h"

static int failures = 0;

#define EXPECT(condition)                                                          \
  do {                                                                             \
    if (!(condition)) {                                                            \
      printf("%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, sy_last_error()); \
      ++failures;                                                                  \
    }                                                                              \
  } while (0)

static inline sy_tensor tensor(void* data, int32_t ndim, const int64_t* shape, uint8_t code) {
  sy_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device_type = SY_DEVICE_CPU;
  t.ndim = ndim;
  t.type_code = code;
  t.type_bits = 32;
  t.type_lanes = 1;
  t.shape = shape;
  return t;
}

/* Made-up numbers between -1 and 1. */
static inline void fill(float* values, int64_t size, unsigned seed) {
  int64_t i;
  for (i = 0; i < size; ++i) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = (float)(int)(seed >> 16 & 0xffff) / 32768.0f - 1.0f;
  }
}

#endif /* SWITCHYARD_TESTS_C_API_SUPPORT_H */
