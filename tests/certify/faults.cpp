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
#include <utility>

namespace {

std::atomic<const char*> armed{nullptr};
std::atomic<long> failing{0}, seen{0};
char name_of_armed[64];

bool fails(const char* name) {
  const char* which = armed.load();
  if (which == nullptr || std::strcmp(which, name) != 0) return false;
  return ++seen == failing;
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

template <typename Result>
Result failed(int error, Result result) {
  errno = error;
  return result;
}

constexpr int no_memory = 2, out_of_resources = 701;                       // cudaError_t
constexpr int blas_failed = 13, blas_unsupported = 15, dnn_failed = 5000;  // of cuBLAS, cuDNN
constexpr const char *libc = nullptr, *runtime = "libcudart.so", *blas = "libcublasLt.so",
                     *dnn = "libcudnn.so";
thread_local int pending = 0;  // what a call of the runtime has left

int left(int error) { return pending = error; }

using Word = void*;

struct Dim3 {
  unsigned x, y, z;
};

}  // namespace

extern "C" {

// The nth call of this function from now on fails.
void faults_arm(const char* name, long nth) {
  armed = nullptr;
  std::strncpy(name_of_armed, name, sizeof(name_of_armed) - 1);
  seen = 0, failing = nth;
  armed = name_of_armed;
}

// How often it was called meanwhile.
long faults_disarm() {
  armed = nullptr;
  return seen;
}

// Replaces a function; where a call of `which` is to fail, it gives `failure`.
#define REPLACE(result, name, parameters, arguments, library, which, failure) \
  result name parameters {                                                    \
    static const auto next = real(name, #name, library);                      \
    return fails(#which) ? failure : next arguments;                          \
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
  return fails("open") ? failed(EMFILE, -1) : next(path, flags, mode);
}

size_t fwrite(const void* data, size_t size, size_t count, FILE* file) {
  static const auto next = real(fwrite, "fwrite");
  if (!fails("fwrite")) return next(data, size, count, file);
  errno = ENOSPC;
  return next(data, 1, size * count / 2, file);  // half of it, as on a full disk
}

REPLACE(FILE*, fopen, (const char* path, const char* mode), (path, mode), libc, fopen,
        failed<FILE*>(EACCES, nullptr))
REPLACE(int, fflush, (FILE * file), (file), libc, fflush, failed(ENOSPC, EOF))
REPLACE(int, fsync, (int file), (file), libc, fsync, failed(EIO, -1))
REPLACE(int, flock, (int file, int what), (file, what), libc, flock, failed(ENOLCK, -1))
REPLACE(int, rename, (const char* from, const char* to), (from, to), libc, rename,
        failed(EXDEV, -1))

// ---- CUDA --------------------------------------------------------------------------------------

REPLACE(int, cudaMalloc, (void** result, size_t size), (result, size), runtime, cudaMalloc,
        left(no_memory))
REPLACE(int, cudaMallocAsync, (void** result, size_t size, Word stream), (result, size, stream),
        runtime, cudaMalloc, left(no_memory))
REPLACE(int, cudaLaunchKernel,
        (const void* kernel, Dim3 grid, Dim3 block, void** arguments, size_t shared, Word stream),
        (kernel, grid, block, arguments, shared, stream), runtime, cudaLaunchKernel,
        left(out_of_resources))
REPLACE(int, cudaLaunchKernelExC, (Word config, const void* kernel, void** arguments),
        (config, kernel, arguments), runtime, cudaLaunchKernel, left(out_of_resources))
REPLACE(int, cublasLtMatmul,
        (Word handle, Word description, Word alpha, Word a, Word a_layout, Word b, Word b_layout,
         Word beta, Word c, Word c_layout, Word d, Word d_layout, Word algorithm, Word workspace,
         size_t size, Word stream),
        (handle, description, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
         algorithm, workspace, size, stream),
        blas, cublasLtMatmul, blas_failed)
REPLACE(int, cublasLtMatmulAlgoGetHeuristic,
        (Word handle, Word description, Word a, Word b, Word c, Word d, Word preference, int count,
         Word results, int* returned),
        (handle, description, a, b, c, d, preference, count, results, returned), blas,
        cublasLtMatmulAlgoGetHeuristic, (*returned = 0, blas_unsupported))
REPLACE(int, cudnnBackendExecute, (Word handle, Word plan, Word pack), (handle, plan, pack), dnn,
        cudnnBackendExecute, dnn_failed)
REPLACE(int, cudnnBackendFinalize, (Word descriptor), (descriptor), dnn, cudnnBackendFinalize,
        dnn_failed)

int cudaGetLastError() {
  static const auto next = real(cudaGetLastError, "cudaGetLastError", runtime);
  const int mine = std::exchange(pending, 0);
  const int theirs = next();
  return mine != 0 ? mine : theirs;
}

int cudaPeekAtLastError() {
  static const auto next = real(cudaPeekAtLastError, "cudaPeekAtLastError", runtime);
  return pending != 0 ? pending : next();
}

}  // extern "C"
