// What this machine can run, and what this library is. Compiled for any machine.
#include "abi.h"
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* quire_build_id() { return QUIRE_BUILD_ID; }

// By instruction set; `__builtin_cpu_supports` asks the operating system too whether registers are kept.
EXPORT int quire_runs_portable() { return 1; }

#if defined(__x86_64__)
EXPORT int quire_runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

EXPORT int quire_runs_avx512() {
  return quire_runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

EXPORT int64_t quire_struct_bytes() {
  return sizeof(Layer) + sizeof(Rows) + sizeof(Buffers) + sizeof(Linear) + sizeof(Heads) + sizeof(DecoderLayer) +
         sizeof(Model) + sizeof(Step) + sizeof(Chunk);
}
