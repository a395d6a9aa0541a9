// Lets the n-th call of a function of the C library fail: LD_PRELOAD. `fault_arm` starts counting.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, MEMALIGN, MALLOC, WRITE, FSYNC, RENAME, MMAP };

#define LEAST 65536  // bytes of an allocation that counts

static atomic_int function = NONE;
static atomic_long calls;
static long fails_at;
static int stack;  // a file for the stack of the call that fails

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

// Counts the calls of a function from now on, and lets call n fail; 0: none.
void fault_arm(int which, long n, int file) {
  void* warm[4];
  backtrace(warm, 4);  // loads libgcc now
  fails_at = n;
  stack = file;
  calls = 0;
  function = which;
}

// Ends it; returns the number of calls.
long fault_disarm(void) {
  function = NONE;
  return calls;
}

static int fails(int which) {
  if (function != which || ++calls != fails_at) return 0;
  void* frames[64];
  backtrace_symbols_fd(frames, backtrace(frames, 64), stack);
  return 1;
}

static void* no_memory(void) {
  errno = ENOMEM;
  return NULL;
}

void* malloc(size_t size) {
  return size >= LEAST && fails(MALLOC) ? no_memory() : __libc_malloc(size);
}

void* calloc(size_t count, size_t size) {
  return size && count >= LEAST / size && fails(MALLOC) ? no_memory() : __libc_calloc(count, size);
}

void* realloc(void* memory, size_t size) {
  return size >= LEAST && fails(MALLOC) ? no_memory() : __libc_realloc(memory, size);
}

int posix_memalign(void** memory, size_t alignment, size_t size) {
  if (size >= LEAST && fails(MEMALIGN)) return ENOMEM;
  *memory = __libc_memalign(alignment, size);
  return *memory ? 0 : ENOMEM;
}

void* aligned_alloc(size_t alignment, size_t size) {
  return size >= LEAST && fails(MEMALIGN) ? no_memory() : __libc_memalign(alignment, size);
}

static void* next(const char* name) {
  void* found = dlsym(RTLD_NEXT, name);
  if (!found) abort();
  return found;
}

#define NEXT(name) ((__typeof__(&name))next(#name))

static int is_file(int file) {
  struct stat status;
  return !fstat(file, &status) && S_ISREG(status.st_mode);
}

static int full(int file) {
  if (function != WRITE || !is_file(file) || !fails(WRITE)) return 0;
  errno = ENOSPC;
  return 1;
}

ssize_t write(int file, const void* bytes, size_t count) {
  return full(file) ? -1 : NEXT(write)(file, bytes, count);
}

ssize_t writev(int file, const struct iovec* parts, int count) {
  return full(file) ? -1 : NEXT(writev)(file, parts, count);
}

int fsync(int file) {
  if (fails(FSYNC)) {
    errno = EIO;
    return -1;
  }
  return NEXT(fsync)(file);
}

int rename(const char* from, const char* to) {
  if (fails(RENAME)) {
    errno = EIO;
    return -1;
  }
  return NEXT(rename)(from, to);
}

static int no_map(size_t size) {
  if (size < LEAST || !fails(MMAP)) return 0;
  errno = ENOMEM;
  return 1;
}

void* mmap(void* at, size_t size, int access, int flags, int file, off_t offset) {
  return no_map(size) ? MAP_FAILED : NEXT(mmap)(at, size, access, flags, file, offset);
}

void* mmap64(void* at, size_t size, int access, int flags, int file, off64_t offset) {
  return no_map(size) ? MAP_FAILED : NEXT(mmap64)(at, size, access, flags, file, offset);
}
