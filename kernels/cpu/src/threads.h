// Threads: those of the libgomp that PyTorch has loaded, so that there is one pool of them.
#pragma once
#include <sched.h>
#include <stdint.h>

extern "C" {
void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}

namespace {

// Threads that go through the same stages. `next` is the first piece of work of a stage that nobody has taken.
struct Team {
  int32_t next, num_arrived, num_stages;
};

class Worker {
 public:
  Worker(Team& team, int thread, int num_threads) : thread(thread), num_threads(num_threads), team_(team) {}

  const int thread, num_threads;

  // A stage: `work(n)` for each n below `count`, of which a thread takes `at_once` in a row. Ends when all are done.
  template <class Work>
  void share(int count, int at_once, Work work) {
    for (int first; (first = __atomic_fetch_add(&team_.next, at_once, __ATOMIC_RELAXED)) < count;)
      for (int n = first; n < count && n < first + at_once; ++n) work(n);
    wait();
  }

 private:
  // Stages are short, so a thread spins; it lets others run where there are more threads than processors.
  void wait() {
    ++stage_;
    if (__atomic_add_fetch(&team_.num_arrived, 1, __ATOMIC_ACQ_REL) == num_threads) {
      team_.next = team_.num_arrived = 0;
      __atomic_store_n(&team_.num_stages, stage_, __ATOMIC_RELEASE);
      return;
    }
    for (int n = 0; __atomic_load_n(&team_.num_stages, __ATOMIC_ACQUIRE) < stage_; ++n)
      if (n >= 2000) sched_yield();
  }

  Team& team_;
  int32_t stage_ = 0;
};

// Calls `body` on each of up to `num_threads` threads.
template <class Body>
inline void with_team(int num_threads, Body body) {
  struct Start {
    Team team;
    Body& body;

    static void run(void* self) {
      Start& start = *(Start*)self;
      Worker worker(start.team, omp_get_thread_num(), omp_get_num_threads());
      start.body(worker);
    }
  } start = {{}, body};
  GOMP_parallel(Start::run, &start, num_threads, 0);
}

}  // namespace
