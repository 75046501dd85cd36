// Preloaded (LD_PRELOAD), makes the nth call of a function fail, once told to by faults_arm.
//
// The functions of CUDA's libraries are declared by hand, so that no header of theirs is needed;
// the real ones are looked up in the library that is loaded when they are first called.

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <sys/types.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

std::atomic<const char*> armed{nullptr};
std::atomic<long> first{0}, last{0}, seen{0};
char name_of_armed[64];

bool fails(const char* name) {
  const char* which = armed.load();
  if (which == nullptr || std::strcmp(which, name) != 0) return false;
  const long number = ++seen;
  return number >= first && number <= last;
}

struct Wanted {
  const char* part;
  char path[4096];
};

int remember_path(dl_phdr_info* info, size_t, void* data) {
  auto& wanted = *static_cast<Wanted*>(data);
  if (std::strstr(info->dlpi_name, wanted.part) == nullptr) return 0;
  std::strncpy(wanted.path, info->dlpi_name, sizeof(wanted.path) - 1);
  return 1;
}

// The function itself: after this library, or, in one that Python has opened for itself, there.
void* found(const char* name, const char* library) {
  if (void* there = dlsym(RTLD_NEXT, name)) return there;
  Wanted wanted{library, {}};
  if (library == nullptr || dl_iterate_phdr(remember_path, &wanted) == 0) std::abort();
  void* handle = dlopen(wanted.path, RTLD_LAZY | RTLD_NOLOAD);
  void* there = handle != nullptr ? dlsym(handle, name) : nullptr;
  if (there == nullptr) std::abort();
  return there;
}

// With the signature of the one here.
template <typename Function>
Function* real(Function*, const char* name, const char* library = nullptr) {
  return reinterpret_cast<Function*>(found(name, library));
}

bool is_in(void* address, const char* library) {
  Dl_info info;
  return dladdr(address, &info) != 0 && std::strstr(info.dli_fname, library) != nullptr;
}

using Word = void*;

}  // namespace

extern "C" {

// From now on calls `nth` to `nth + count - 1` of this function fail.
void faults_arm(const char* name, long nth, long count) {
  armed = nullptr;
  std::strncpy(name_of_armed, name, sizeof(name_of_armed) - 1);
  seen = 0, first = nth, last = nth + count - 1;
  armed = name_of_armed;
}

// How often it was called meanwhile.
long faults_disarm() {
  armed = nullptr;
  return seen;
}

// ---- memory of the CPU, files ------------------------------------------------------------------

int posix_memalign(void** result, size_t alignment, size_t size) {
  static const auto next = real(posix_memalign, "posix_memalign");
  // Those of torch's allocator only; oneDNN, for one, ends the process where its own fail.
  const bool asked = armed.load() != nullptr && is_in(__builtin_return_address(0), "libc10.so");
  return asked && fails("posix_memalign") ? ENOMEM : next(result, alignment, size);
}

int open(const char* path, int flags, ...) {
  static const auto next = real(open, "open");
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  if (!fails("open")) return next(path, flags, mode);
  errno = EMFILE;
  return -1;
}

FILE* fopen(const char* path, const char* mode) {
  static const auto next = real(fopen, "fopen");
  if (!fails("fopen")) return next(path, mode);
  errno = EACCES;
  return nullptr;
}

size_t fwrite(const void* data, size_t size, size_t count, FILE* file) {
  static const auto next = real(fwrite, "fwrite");
  if (!fails("fwrite")) return next(data, size, count, file);
  errno = ENOSPC;
  return next(data, 1, size * count / 2, file);  // half of it, as on a full disk
}

int fflush(FILE* file) {
  static const auto next = real(fflush, "fflush");
  if (!fails("fflush")) return next(file);
  errno = ENOSPC;
  return EOF;
}

int fsync(int descriptor) {
  static const auto next = real(fsync, "fsync");
  if (!fails("fsync")) return next(descriptor);
  errno = EIO;
  return -1;
}

int flock(int descriptor, int operation) {
  static const auto next = real(flock, "flock");
  if (!fails("flock")) return next(descriptor, operation);
  errno = ENOLCK;
  return -1;
}

int rename(const char* from, const char* to) {
  static const auto next = real(rename, "rename");
  if (!fails("rename")) return next(from, to);
  errno = EXDEV;
  return -1;
}

// ---- CUDA --------------------------------------------------------------------------------------

namespace {
constexpr int no_memory = 2, out_of_resources = 701;                       // cudaError_t
constexpr int blas_failed = 13, blas_unsupported = 15, dnn_failed = 5000;  // of cuBLAS, cuDNN
thread_local int pending = 0;                                              // what a launch has left

struct Dim3 {
  unsigned x, y, z;
};

int launch_failed() { return pending = out_of_resources; }
}  // namespace

int cudaMalloc(void** result, size_t size) {
  static const auto next = real(cudaMalloc, "cudaMalloc", "libcudart.so");
  if (!fails("cudaMalloc")) return next(result, size);
  return pending = no_memory;
}

int cudaMallocAsync(void** result, size_t size, Word stream) {
  static const auto next = real(cudaMallocAsync, "cudaMallocAsync", "libcudart.so");
  if (!fails("cudaMalloc")) return next(result, size, stream);
  return pending = no_memory;
}

int cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void** arguments, size_t shared,
                     Word stream) {
  static const auto next = real(cudaLaunchKernel, "cudaLaunchKernel", "libcudart.so");
  if (!fails("cudaLaunchKernel")) return next(kernel, grid, block, arguments, shared, stream);
  return launch_failed();
}

int cudaLaunchKernelExC(Word config, const void* kernel, void** arguments) {
  static const auto next = real(cudaLaunchKernelExC, "cudaLaunchKernelExC", "libcudart.so");
  if (!fails("cudaLaunchKernel")) return next(config, kernel, arguments);
  return launch_failed();
}

int cudaGetLastError() {
  static const auto next = real(cudaGetLastError, "cudaGetLastError", "libcudart.so");
  const int mine = pending;
  pending = 0;
  const int theirs = next();
  return mine != 0 ? mine : theirs;
}

int cudaPeekAtLastError() {
  static const auto next = real(cudaPeekAtLastError, "cudaPeekAtLastError", "libcudart.so");
  return pending != 0 ? pending : next();
}

int cublasLtMatmul(Word handle, Word description, Word alpha, Word a, Word a_layout, Word b,
                   Word b_layout, Word beta, Word c, Word c_layout, Word d, Word d_layout,
                   Word algorithm, Word workspace, size_t size, Word stream) {
  static const auto next = real(cublasLtMatmul, "cublasLtMatmul", "libcublasLt.so");
  if (fails("cublasLtMatmul")) return blas_failed;
  return next(handle, description, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
              algorithm, workspace, size, stream);
}

int cublasLtMatmulAlgoGetHeuristic(Word handle, Word description, Word a, Word b, Word c, Word d,
                                   Word preference, int count, Word results, int* returned) {
  static const auto next =
      real(cublasLtMatmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic", "libcublasLt.so");
  if (!fails("cublasLtMatmulAlgoGetHeuristic")) {
    return next(handle, description, a, b, c, d, preference, count, results, returned);
  }
  *returned = 0;
  return blas_unsupported;
}

int cudnnBackendExecute(Word handle, Word plan, Word pack) {
  static const auto next = real(cudnnBackendExecute, "cudnnBackendExecute", "libcudnn.so");
  return fails("cudnnBackendExecute") ? dnn_failed : next(handle, plan, pack);
}

int cudnnBackendFinalize(Word descriptor) {
  static const auto next = real(cudnnBackendFinalize, "cudnnBackendFinalize", "libcudnn.so");
  return fails("cudnnBackendFinalize") ? dnn_failed : next(descriptor);
}

}  // extern "C"
