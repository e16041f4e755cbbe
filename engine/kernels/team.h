// The threads of one call, and how they share its stages.
//
// A step has hundreds of stages of microseconds. OpenMP would start its threads anew for each of them, and has to
// spin between calls to be quick at it, on cores that the drafter wants in the meantime. Here the threads are started
// once a call, spin inside it, and may sleep after it. Units of a stage go to whoever is free: a thread that has lost
// its core to another process holds up the others for one unit, not for half a stage.
#pragma once

#include <ATen/Parallel.h>
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace dspark {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  // f(begin, end) over pieces of 0 .. n - 1, of at least `chunk` units each. Every thread calls the same stages in the
  // same order, and goes on when all of a stage is done.
  template <typename F>
  void stage(int64_t n, int64_t chunk, F f) {
    const int size = omp_get_num_threads();
    if (size == 1) {
      if (n > 0) f(int64_t{0}, n);
      return;
    }
    const int64_t piece = std::max<int64_t>({1, chunk, n / (4 * size)});
    for (int64_t at; (at = next_.fetch_add(piece, std::memory_order_relaxed)) < n;) f(at, std::min(n, at + piece));
    wait(size);
  }

 private:
  // The last one to arrive opens the next stage.
  void wait(int size) {
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < 4000) pause();
      else sched_yield();
    }
  }

  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

// Runs f(team) on all of torch's threads. f must not throw.
template <typename F>
void in_team(F f) {
  Team team;
#pragma omp parallel num_threads(omp_in_parallel() ? 1 : at::get_num_threads())
  f(team);
}

}  // namespace dspark
