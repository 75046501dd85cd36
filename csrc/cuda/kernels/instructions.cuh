#pragma once

namespace fused::cuda {

__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Lets the stream's next kernel start, and waits for the one before (programmatic dependent
// launch). A kernel that starts early must call this before it touches memory.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Waits for all threads of the cluster's blocks. Their earlier writes can be read afterwards.
__device__ inline void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();  // the aligned instruction needs the warp's threads together
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

template <typename T>
__device__ T* in_block(T* shared, unsigned rank) {
#if __CUDA_ARCH__ >= 900
  asm("mapa.u64 %0, %1, %2;" : "=l"(shared) : "l"(shared), "r"(rank));
#endif
  return shared;
}

}  // namespace fused::cuda
