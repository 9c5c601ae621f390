// Threads: those of the libgomp that PyTorch has loaded, so that there is one pool of them. And what the library shows.
#pragma once
#include <stdint.h>

extern "C" {
void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
void GOMP_barrier(void);
int omp_get_thread_num(void);
}

#define JOINED(name, path) name##_##path
#define NAMED(name, path) JOINED(name, path)
#define EXPORT(name) extern "C" __attribute__((visibility("default"))) NAMED(name, QUIRE_PATH)

namespace {

inline int take(int32_t& next, int count) { return __atomic_fetch_add(&next, count, __ATOMIC_RELAXED); }

// Calls `work(n)` for each n below `count`, on `num_threads` threads; each takes `at_once` of them in a row.
template <class Work>
struct Loop {
  Work& work;
  int32_t count, at_once, next;

  static void run(void* self) {
    Loop& loop = *(Loop*)self;
    for (int first; (first = take(loop.next, loop.at_once)) < loop.count;)
      for (int n = first; n < loop.count && n < first + loop.at_once; ++n) loop.work(n);
  }
};

template <class Work>
inline void share(int count, int at_once, int num_threads, Work work) {
  Loop<Work> loop = {work, count, at_once, 0};
  if (num_threads == 1 || count <= at_once) return Loop<Work>::run(&loop);
  GOMP_parallel(Loop<Work>::run, &loop, num_threads, 0);
}

}  // namespace
