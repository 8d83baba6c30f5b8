// One thread's attributes and the addresses of the kernel's buffers, as the runtime fills them and a kernel's driver reads them.
#pragma once

struct emu_thread {
  unsigned thread_position_in_grid[3];
  unsigned thread_position_in_threadgroup[3];
  unsigned threadgroup_position_in_grid[3];
  unsigned threads_per_grid[3];
  unsigned threadgroups_per_grid[3];
  unsigned threads_per_threadgroup[3];
  unsigned dispatch_threads_per_threadgroup[3];
  unsigned grid_origin[3];
  unsigned thread_index_in_threadgroup;
  unsigned simdgroup_index_in_threadgroup;
  unsigned thread_index_in_simdgroup;
  unsigned simdgroups_per_threadgroup;
  unsigned dispatch_simdgroups_per_threadgroup;
  unsigned long buffers[64];
};

// What the lanes of a simdgroup handed over: at most a vector of four 32-bit elements each.
struct emu_exchange {
  char value[32][16];
  unsigned active;
  unsigned done;
  char result[16];
  char undefined[16];
};
