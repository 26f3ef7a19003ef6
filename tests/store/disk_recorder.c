/* Records, in order, what a process does to the files below one folder; loaded with LD_PRELOAD.

   KNNSTORE_RECORD_ROOT  the folder, without symbolic links
   KNNSTORE_RECORD_LOG   the file that the record is appended to, outside of it

   A record is a packed `struct header`, two paths, and the data of a write. What failed is left out. What
   goes to the kernel past the C library's exported functions is not seen: what stdio writes, and stores through
   a shared map, which are refused (kind '?') but for SQLite's -shm, which no crash survives anyway. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

struct __attribute__((packed)) header {
    char kind;
    uint32_t path, path2;
    uint64_t offset, length;
};

static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;
static const char *root;
static int journal = -1;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("KNNSTORE_RECORD_LOG");
    root = getenv("KNNSTORE_RECORD_ROOT");
    if (root && path)
        journal = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

static int recorded(const char *path) {
    size_t n = root ? strlen(root) : 0;
    return journal >= 0 && !strncmp(path, root, n) && (path[n] == '/' || !path[n]);
}

/* The path of what a descriptor has open; 0 where it is not in the folder, or has no name any more. */
static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return recorded(path) && !(n > 10 && !strcmp(path + n - 10, " (deleted)"));
}

/* The path of a name in a folder, the folder's own links resolved. */
static int resolve(int at, const char *name, char *path) {
    char folder[PATH_MAX * 2], copy[PATH_MAX];
    snprintf(copy, sizeof copy, "%s", name);
    size_t n = strlen(copy);
    while (n > 1 && copy[n - 1] == '/') copy[--n] = 0;
    char *slash = strrchr(copy, '/');
    const char *last = slash ? slash + 1 : copy;
    if (copy[0] == '/')
        snprintf(folder, sizeof folder, "%.*s", slash == copy ? 1 : (int)(slash - copy), copy);
    else {
        char base[PATH_MAX] = ".";
        if (at != AT_FDCWD) snprintf(base, sizeof base, "/proc/self/fd/%d", at);
        snprintf(folder, sizeof folder, "%s/%.*s", base, slash ? (int)(slash - copy) : 0, copy);
    }
    char real[PATH_MAX];
    if (!realpath(folder, real)) return 0;
    snprintf(folder, sizeof folder, "%s/%s", real, last);
    if (strlen(folder) >= PATH_MAX) return 0;
    strcpy(path, folder);
    return recorded(path);
}

static void append(char kind, const char *path, const char *path2, off_t offset, const void *data, size_t n) {
    struct header head = {kind, strlen(path), path2 ? strlen(path2) : 0, offset, n};
    struct iovec parts[4] = {
        {&head, sizeof head}, {(void *)path, head.path}, {(void *)path2, head.path2}, {(void *)data, data ? n : 0}};
    ssize_t all = sizeof head + head.path + head.path2 + parts[3].iov_len;
    if (syscall(SYS_writev, journal, parts, 4) != all) abort();
}

#define REAL(name)                                           \
    static __typeof__(&name) real;                           \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define BEGIN pthread_mutex_lock(&order)
#define END                           \
    do {                              \
        int error = errno;            \
        pthread_mutex_unlock(&order); \
        errno = error;                \
    } while (0)

/* -- files */

static void opened(int fd, int flags) {
    char path[PATH_MAX];
    if (fd < 0 || !(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE || !path_of(fd, path)) return;
    append('c', path, 0, 0, 0, 0);
    if (flags & O_TRUNC) append('t', path, 0, 0, 0, 0);
}

#define OPEN(name, parameters, arguments)         \
    int name parameters {                         \
        REAL(name);                               \
        va_list more;                             \
        va_start(more, flags);                    \
        mode_t mode = va_arg(more, mode_t);       \
        va_end(more);                             \
        if (!(flags & (O_CREAT | O_TRUNC))) return real arguments; \
        BEGIN;                                    \
        int fd = real arguments;                  \
        opened(fd, flags);                        \
        END;                                      \
        return fd;                                \
    }
OPEN(open, (const char *name, int flags, ...), (name, flags, mode))
OPEN(open64, (const char *name, int flags, ...), (name, flags, mode))
OPEN(openat, (int at, const char *name, int flags, ...), (at, name, flags, mode))
OPEN(openat64, (int at, const char *name, int flags, ...), (at, name, flags, mode))
int creat(const char *name, mode_t mode) { return open(name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return open(name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* What a call has just put into a file, read back from it: also where the call's own data is elsewhere. */
static void written(int fd, off_t offset, ssize_t n) {
    char path[PATH_MAX], link[64];
    if (n <= 0 || !path_of(fd, path)) return;
    struct stat status;
    if (fstat(fd, &status) || !S_ISREG(status.st_mode)) return;
    if (offset < 0) offset = lseek(fd, 0, SEEK_CUR) - n;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int reading = syscall(SYS_openat, AT_FDCWD, link, O_RDONLY | O_CLOEXEC);
    char *data = malloc(n);
    if (reading < 0 || !data || pread(reading, data, n, offset) != n) abort();
    append('w', path, 0, offset, data, n);
    free(data);
    syscall(SYS_close, reading);
}

#define WRITE(type, name, parameters, arguments, fd, offset) \
    type name parameters {                                   \
        REAL(name);                                          \
        BEGIN;                                               \
        type n = real arguments;                             \
        int failed = errno;                                  \
        written(fd, offset, n);                              \
        errno = failed;                                      \
        END;                                                 \
        return n;                                            \
    }
WRITE(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size), fd, -1)
WRITE(ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count), fd, -1)
WRITE(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at), fd, at)
WRITE(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at), fd, at)
WRITE(ssize_t, pwritev, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at), fd, at)
WRITE(ssize_t, pwritev64, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at), fd, at)
WRITE(ssize_t, sendfile, (int fd, int from, off_t *at, size_t size), (fd, from, at, size), fd, -1)
WRITE(ssize_t, sendfile64, (int fd, int from, off64_t *at, size_t size), (fd, from, at, size), fd, -1)
WRITE(ssize_t, copy_file_range, (int from, off64_t *start, int fd, off64_t *at, size_t size, unsigned flags),
      (from, start, fd, at, size, flags), fd, at ? *at - (n > 0 ? n : 0) : -1)

#define ON_DESCRIPTOR(name, parameters, arguments, kind, offset) \
    int name parameters {                                        \
        REAL(name);                                              \
        BEGIN;                                                   \
        int result = real arguments;                             \
        char path[PATH_MAX];                                     \
        if (!result && path_of(fd, path)) append(kind, path, 0, offset, 0, 0); \
        END;                                                     \
        return result;                                           \
    }
ON_DESCRIPTOR(fsync, (int fd), (fd), 's', 0)
ON_DESCRIPTOR(fdatasync, (int fd), (fd), 's', 0)
ON_DESCRIPTOR(ftruncate, (int fd, off_t size), (fd, size), 't', size)
ON_DESCRIPTOR(ftruncate64, (int fd, off64_t size), (fd, size), 't', size)
ON_DESCRIPTOR(fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size), '?', 0)
ON_DESCRIPTOR(fallocate64, (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size), '?', 0)
/* Nobody here allocates what is there already: the file gets longer. */
ON_DESCRIPTOR(posix_fallocate, (int fd, off_t at, off_t size), (fd, at, size), 't', at + size)
ON_DESCRIPTOR(posix_fallocate64, (int fd, off64_t at, off64_t size), (fd, at, size), 't', at + size)

static void mapped(int protection, int flags, int fd) {
    char path[PATH_MAX];
    if (fd < 0 || !(protection & PROT_WRITE) || !(flags & MAP_SHARED) || !path_of(fd, path)) return;
    size_t n = strlen(path);
    if (n < 4 || strcmp(path + n - 4, "-shm")) append('?', path, 0, 0, 0, 0);
}
#define MAP(name, type)                                                                     \
    void *name(void *address, size_t size, int protection, int flags, int fd, type at) {    \
        REAL(name);                                                                         \
        BEGIN;                                                                              \
        void *found = real(address, size, protection, flags, fd, at);                       \
        if (found != MAP_FAILED) mapped(protection, flags, fd);                             \
        END;                                                                                \
        return found;                                                                       \
    }
MAP(mmap, off_t)
MAP(mmap64, off64_t)

/* -- names */

#define ON_NAME(name, parameters, arguments, at, given, kind)  \
    int name parameters {                                      \
        REAL(name);                                            \
        char path[PATH_MAX];                                   \
        BEGIN;                                                 \
        int inside = resolve(at, given, path);                 \
        int result = real arguments;                           \
        if (!result && inside) append(kind, path, 0, 0, 0, 0); \
        END;                                                   \
        return result;                                         \
    }
ON_NAME(unlink, (const char *name), (name), AT_FDCWD, name, 'u')
ON_NAME(unlinkat, (int at, const char *name, int flags), (at, name, flags), at, name, 'u')
ON_NAME(rmdir, (const char *name), (name), AT_FDCWD, name, 'u')
ON_NAME(mkdir, (const char *name, mode_t mode), (name, mode), AT_FDCWD, name, 'm')
ON_NAME(mkdirat, (int at, const char *name, mode_t mode), (at, name, mode), at, name, 'm')
ON_NAME(symlink, (const char *target, const char *name), (target, name), AT_FDCWD, name, '?')
ON_NAME(symlinkat, (const char *target, int at, const char *name), (target, at, name), at, name, '?')
ON_NAME(truncate, (const char *name, off_t size), (name, size), AT_FDCWD, name, '?')
ON_NAME(truncate64, (const char *name, off64_t size), (name, size), AT_FDCWD, name, '?')

#define ON_TWO_NAMES(name, parameters, arguments, at, given, at2, given2, kind)         \
    int name parameters {                                                               \
        REAL(name);                                                                     \
        char path[PATH_MAX], path2[PATH_MAX];                                           \
        BEGIN;                                                                          \
        int inside = resolve(at, given, path), inside2 = resolve(at2, given2, path2);   \
        int result = real arguments;                                                    \
        if (!result && (inside || inside2)) append(inside && inside2 ? kind : '?', path, path2, 0, 0, 0); \
        END;                                                                            \
        return result;                                                                  \
    }
ON_TWO_NAMES(rename, (const char *from, const char *to), (from, to), AT_FDCWD, from, AT_FDCWD, to, 'r')
ON_TWO_NAMES(renameat, (int at, const char *from, int at2, const char *to), (at, from, at2, to), at, from, at2, to, 'r')
ON_TWO_NAMES(renameat2, (int at, const char *from, int at2, const char *to, unsigned flags), (at, from, at2, to, flags),
             at, from, at2, to, flags & ~1u ? '?' : 'r')
ON_TWO_NAMES(link, (const char *from, const char *to), (from, to), AT_FDCWD, from, AT_FDCWD, to, 'l')
ON_TWO_NAMES(linkat, (int at, const char *from, int at2, const char *to, int flags), (at, from, at2, to, flags), at, from,
             at2, to, 'l')
